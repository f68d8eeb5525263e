"""Pictures of timelines and of memory, as SVG, PNG or a trace."""

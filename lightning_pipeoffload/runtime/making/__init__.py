"""A module made in parts: each rank has the values of what it owns, and never all."""

"""The processes of a pipeline: started, connected, watched, and stopped together."""

"""Cutting a user's step into stages: the trace, the partition, the refusals."""

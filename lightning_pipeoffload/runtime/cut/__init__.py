"""How a user's step can be cut into stages: the trace, the partition, the refusals."""

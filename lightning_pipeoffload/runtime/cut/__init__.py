"""How a user's step can be cut into stages: the probe, the partition, what is refused."""

"""Saved tensors of a rank between F, B and W: counted, offloaded to the host, recomputed."""

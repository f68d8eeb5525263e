"""Tensors without values, which replace tensors of other stages and ranks."""

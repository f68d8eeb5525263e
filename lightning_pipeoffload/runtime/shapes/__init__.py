"""Tensors without values, which stand for what another stage or rank has."""

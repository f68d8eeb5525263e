"""Constructs a module in parts: each rank allocates only the values that it owns."""

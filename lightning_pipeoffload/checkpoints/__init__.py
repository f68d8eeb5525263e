"""The state of all ranks as one checkpoint: brought together, written whole, read safely."""

"""Checkpoints of all ranks' state: gathered, written atomically, and read safely."""

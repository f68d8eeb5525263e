"""Hooks of the user's module and callbacks, and the values that they use, over all ranks."""

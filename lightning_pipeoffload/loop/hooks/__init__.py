"""Hooks of the user's module and callbacks, over ranks of which each has a part of the model."""

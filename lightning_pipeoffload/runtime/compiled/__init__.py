"""Compiled regions of a step: their weight gradients are left for W too."""

"""Compiled regions of a step, whose weight gradients wait for W too."""

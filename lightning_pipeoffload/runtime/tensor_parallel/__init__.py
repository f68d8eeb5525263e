"""Layers that several ranks share, a part each."""

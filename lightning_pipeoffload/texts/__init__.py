"""Texts of uneven length: divided into parts of equal cost, and read from a loader in groups."""

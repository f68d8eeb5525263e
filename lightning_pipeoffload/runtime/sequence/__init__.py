"""Slices of a microbatch along its sequences: their positions, and their attention."""

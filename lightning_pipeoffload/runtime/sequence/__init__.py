"""Slices of a microbatch along its sequences: their places, and what they attend to."""

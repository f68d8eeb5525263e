"""Settings for tests in pairs: every value of each axis at least once, and not each with each."""

from itertools import cycle, islice

import pytest


def pairs(*axes):
    """Go through the axes side by side, over and over, until the longest has had its turn."""
    longest = max(map(len, axes))
    return [*zip(*(islice(cycle(axis), longest) for axis in axes), strict=True)]


def some(values, every):
    """Return parameters of which each so-manyth is for the default run; the others are slow."""
    return [value if index % every == 0 else slow(value) for index, value in enumerate(values)]


def first(count, values):
    """Return parameters of which the first so many are for the default run; the others are slow."""
    return [*values[:count], *map(slow, values[count:])]


# One schedule of each shape: B and W apart, both at once, several stages per rank, a V, copies.
SHAPES = ["zb_h1", "1f1b", "interleaved_1f1b", "zb_v", "po_h"]


def by_shape(names):
    """Return names of schedules of which one of each shape is for the default run."""
    return [name if name in SHAPES else slow(name) for name in names]


def slow(value):
    """Return a parameter that the default run leaves out."""
    return pytest.param(*values_of(value), marks=pytest.mark.slow)


def values_of(value):
    """Return the values of a test's arguments."""
    return value if isinstance(value, tuple) else (value,)

"""Settings for tests in pairs: every value of each axis at least once, and not each with each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Go through the axes side by side, over and over, until the longest has had its turn."""
    longest = max(map(len, axes))
    return [*zip(*(islice(cycle(axis), longest) for axis in axes), strict=True)]

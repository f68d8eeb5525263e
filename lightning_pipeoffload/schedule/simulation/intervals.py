"""Intervals of time that are taken, and the times that are free beside them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from ..timeline import TOLERANCE

__all__ = ["Interval", "disjoint", "earliest", "latest"]

Interval = tuple[float, float]
"""From a time until another, in seconds."""


def disjoint(taken: Iterable[Interval]) -> list[Interval]:
    """Return the same times in intervals that do not meet, by their start."""
    intervals: list[Interval] = []
    for start, end in sorted(taken):
        if intervals and start <= intervals[-1][1] + TOLERANCE:
            intervals[-1] = intervals[-1][0], max(end, intervals[-1][1])
        else:
            intervals.append((start, end))
    return intervals


def earliest(start: float, seconds: float, taken: Sequence[Interval]) -> float:
    """Return the first time from ``start`` on from which so many seconds are free.

    Args:
        start: Not before this.
        seconds: How long.
        taken: Disjoint, by their start.
    """
    for taken_from, taken_until in taken[max(0, bisect_left(taken, (start,)) - 1) :]:
        if start + seconds <= taken_from + TOLERANCE:
            break
        start = max(start, taken_until)
    return start


def latest(end: float, seconds: float, taken: Sequence[Interval]) -> float:
    """Return the last time from which so many seconds are free that are over at ``end``.

    It may be before 0.

    Args:
        end: Not after this.
        seconds: How long.
        taken: Disjoint, by their start.
    """
    for index in range(bisect_left(taken, (end,)) - 1, -1, -1):
        taken_from, taken_until = taken[index]
        if end - seconds >= taken_until - TOLERANCE:
            break
        end = min(end, taken_from)
    return end - seconds

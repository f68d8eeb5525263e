"""The result of a simulation: when each action runs, and the figures that follow from it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .actions import COMPUTE_LANE, HOST_LANE, REDUCE_LANE, Action

__all__ = [
    "Event",
    "Interval",
    "TOLERANCE",
    "Timeline",
    "disjoint",
    "earliest",
    "latest",
]

TOLERANCE = 1e-9
"""Seconds by which two times may differ and still be one: sums of others in another order."""


class Event(NamedTuple):
    """One action in time, in seconds from the start of the step.

    A lane runs its actions in order, beside other lanes: ``compute``, for copies ``d2h`` and
    ``h2d``, ``reduce`` for gradients and ``host`` for the optimizer's steps. An action that frees
    memory, or allocates it for a copy back, is on the compute lane as well and takes no time.
    """

    rank: int
    lane: str
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each action of a schedule runs.

    Attributes:
        events: Every action that takes time or moves memory, earlier ones of a rank and lane first.
        peak_memory: The largest memory of each rank, in the unit of the costs.
        peak_host_memory: The same on the host; empty where that is not known.
    """

    events: tuple[Event, ...]
    peak_memory: tuple[float, ...]
    peak_host_memory: tuple[float, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline."""
        return len(self.peak_memory)

    @cached_property
    def makespan(self) -> float:
        """Seconds until the last action ends."""
        return max((event.end for event in self.events), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds of each rank's compute lane that are work."""
        return tuple(sum(e.end - e.start for e in rank) for rank in self._events_on(COMPUTE_LANE))

    @cached_property
    def span(self) -> tuple[float, ...]:
        """Seconds of each rank from the start of its first action to the end of its last one.

        That may be a REDUCE or a STEP, which the rank's next step waits for.
        """
        ranks = self._events_on(COMPUTE_LANE, REDUCE_LANE, HOST_LANE)
        return tuple(max(e.end for e in rank) - rank[0].start if rank else 0.0 for rank in ranks)

    @property
    def bubble(self) -> float:
        """Idle share of the ranks' time, from the first start to the last end of all."""
        available = self.num_ranks * self.makespan
        return 1 - sum(self.busy) / available if available else 0.0

    @property
    def bubble_unsynchronized(self) -> float:
        """Idle share of the rank with the longest span, within that span.

        The papers' rate for schedules whose optimizer does not synchronize the ranks: a rank that
        starts later may end later.
        """
        span, busy = max(zip(self.span, self.busy, strict=True))
        return 1 - busy / span if span else 0.0

    def _events_on(self, *lanes: str) -> list[list[Event]]:
        by_rank: list[list[Event]] = [[] for _ in range(self.num_ranks)]
        for event in self.events:
            if event.lane in lanes:
                by_rank[event.rank].append(event)
        return by_rank


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

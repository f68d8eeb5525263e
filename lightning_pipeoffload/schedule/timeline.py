"""The result of a simulation: the times of all actions, and figures computed from them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .actions import COMPUTE_LANE, COPY_LANES, Action

TOLERANCE = 1e-9
"""Seconds by which two times may differ and still be one: sums of others in another order."""


class Event(NamedTuple):
    """The start and end of an action, in seconds from the start of the step.

    A lane runs its actions in order, in parallel with other lanes: ``compute``, ``d2h`` and ``h2d``
    for copies, ``reduce`` for gradients and ``host`` for the optimizer's steps. An action that
    frees memory, or allocates it for a copy back, is on the compute lane too and takes no time.
    """

    rank: int
    lane: str
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The times of a schedule's actions.

    Attributes:
        events: Every action that takes time or moves memory, in order on each rank and lane.
        peak_memory: The largest memory of each rank, in the unit of the costs.
        peak_host_memory: The same on the host; empty if it is not known.
        num_sequence_slices: As of the schedule: the slices of a microbatch that actions count by.
    """

    events: tuple[Event, ...]
    peak_memory: tuple[float, ...]
    peak_host_memory: tuple[float, ...] = ()
    num_sequence_slices: int = 1

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
        """Busy seconds of each rank's compute lane."""
        return tuple(sum(e.end - e.start for e in rank) for rank in self._events_on({COMPUTE_LANE}))

    @cached_property
    def span(self) -> tuple[float, ...]:
        """Seconds of each rank from the start of its first action to the end of its last one.

        The last action may be a REDUCE or a STEP, for which the rank's next step waits.
        """
        ranks = self._events_on({event.lane for event in self.events} - COPY_LANES)
        return tuple(max(e.end for e in rank) - rank[0].start if rank else 0.0 for rank in ranks)

    @property
    def bubble(self) -> float:
        """Idle share of all ranks' time, from the first start to the last end."""
        available = self.num_ranks * self.makespan
        return 1 - sum(self.busy) / available if available else 0.0

    @property
    def bubble_unsynchronized(self) -> float:
        """Idle share of the rank with the longest span, within that span.

        The papers' bubble rate for an optimizer that does not synchronize the ranks: a rank that
        starts later may end later.
        """
        span, busy = max(zip(self.span, self.busy, strict=True))
        return 1 - busy / span if span else 0.0

    def microbatch_label(self, action: Action) -> str:
        """Return an action's microbatch, and after a point its slice where it has several."""
        count = self.num_sequence_slices
        microbatch, part = divmod(action.microbatch, count)
        return f"{microbatch}.{part}" if count > 1 else str(microbatch)

    def _events_on(self, lanes: Collection[str]) -> list[list[Event]]:
        by_rank: list[list[Event]] = [[] for _ in range(self.num_ranks)]
        for event in self.events:
            if event.lane in lanes:
                by_rank[event.rank].append(event)
        return by_rank


Interval = tuple[float, float]
"""From a time until another, in seconds."""


def merge_intervals(occupied: Iterable[Interval]) -> list[Interval]:
    """Merge intervals that touch or overlap; return them by their start."""
    intervals: list[Interval] = []
    for start, end in sorted(occupied):
        if intervals and start <= intervals[-1][1] + TOLERANCE:
            intervals[-1] = intervals[-1][0], max(end, intervals[-1][1])
        else:
            intervals.append((start, end))
    return intervals


def earliest_free_start(start: float, seconds: float, occupied: Sequence[Interval]) -> float:
    """Return the first time at or after ``start`` from which ``seconds`` are free.

    ``occupied`` are disjoint intervals, sorted by start.
    """
    for taken_from, taken_until in occupied[max(0, bisect_left(occupied, (start,)) - 1) :]:
        if start + seconds <= taken_from + TOLERANCE:
            break
        start = max(start, taken_until)
    return start

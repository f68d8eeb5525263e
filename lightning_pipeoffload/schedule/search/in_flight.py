"""An order of F and B: one of each in turn, with a limit on what is in flight on every rank.

On rank i that limit is p - i for 1F1B and ZB-H1, and 2(p - i) - 1 for ZB-H2; they differ in nothing
else but where W goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from ..actions import Kind
from .fill_gaps import Wanted
from .problem import Problem
from .progress import Progress

__all__ = ["InFlight"]


class InFlight:
    """One F for each B, and no more F without B than a rank's depth.

    A rank with two stages takes their B in turn, and prefers F of the stage that has just had B, so
    that as much stays in flight on each. F of a stage leaves room for one microbatch in the rank's
    later stages, so that ranks never wait for each other's memory.
    """

    def __init__(self, problem: Problem, depths: Sequence[int], punctuality: float = 0.0) -> None:
        """Set the limits.

        Args:
            problem: The pipeline.
            depths: The most F without B of every rank, at least its number of stages.
            punctuality: Seconds that a rank may have waited, in all, rather than start an F that
                makes the next B late.
        """
        self._problem = problem
        self._depths = depths
        self._punctuality = punctuality
        self._num_in_flight = [0] * problem.num_ranks
        self._forward_is_due = [True] * problem.num_ranks
        self._last_backward: list[int | None] = [None] * problem.num_ranks
        self._room = [0.0] * problem.num_stages
        self._num_later = [0] * problem.num_stages
        for rank, stages in enumerate(problem.stages):
            room = problem.headroom[rank]
            for num_later, stage in enumerate(reversed(stages)):
                room += problem.activation[stage]
                self._room[stage], self._num_later[stage] = room, num_later

    def next(self, progress: Progress, rank: int, now: float) -> Wanted | None:
        """Return F or B in turn, what is ready before what is awaited."""
        backward = self._next_backward(progress, rank, now)
        forward = self._next_forward(progress, rank, now)
        if forward is None or backward is None:
            return forward or backward
        if forward.ready > now:
            return min(backward, forward, key=lambda wanted: wanted.ready)
        if backward.ready > now:
            waits = self._waits_for(backward, forward, progress.idle[rank], now)
            return backward if waits else forward
        return forward if self._forward_is_due[rank] else backward

    def instead(self, progress: Progress, rank: int, now: float) -> Wanted | None:
        """Return nothing: what is ready is next already."""
        return None

    def started(self, rank: int, wanted: Wanted) -> None:
        """Count what is in flight, and take turns."""
        forward = wanted.kind is Kind.F
        self._num_in_flight[rank] += 1 if forward else -1
        self._forward_is_due[rank] = not forward
        if not forward:
            self._last_backward[rank] = wanted.stage

    def _waits_for(self, backward: Wanted, forward: Wanted, idle: float, now: float) -> bool:
        late = now + self._problem.forward[forward.stage] > backward.ready
        return late and idle + backward.ready - now <= self._punctuality

    def _next_forward(self, progress: Progress, rank: int, now: float) -> Wanted | None:
        first = None
        depth_left = self._depths[rank] - self._num_in_flight[rank]
        for stage in self._forward_preference(rank):
            ready, room = progress.next_forward(stage), self._room[stage]
            makes_room = ready <= now and progress.pending[rank]
            # Of the depth a place is left for each of the rank's later stages.
            if ready == inf or self._num_later[stage] >= depth_left:
                continue
            if makes_room or progress.has_room(rank, room):
                first = _earlier(first, Wanted(Kind.F, stage, ready, room), now)
        return first

    def _next_backward(self, progress: Progress, rank: int, now: float) -> Wanted | None:
        first = None
        for stage in self._backward_preference(rank):
            ready = progress.next_backward(stage)
            if ready < inf:
                room = max(0.0, self._problem.growth[stage])
                first = _earlier(first, Wanted(Kind.B, stage, ready, room), now)
        return first

    def _forward_preference(self, rank: int) -> Sequence[int]:
        stages, last = self._problem.stages[rank], self._last_backward[rank]
        return stages if last == stages[0] else stages[::-1]

    def _backward_preference(self, rank: int) -> Sequence[int]:
        stages, last = self._problem.stages[rank], self._last_backward[rank]
        return stages[::-1] if last == stages[0] else stages


def _earlier(first: Wanted | None, second: Wanted, now: float) -> Wanted:
    """Return what is ready, the first one if both are, else what is awaited for less long."""
    if first is None or first.ready > max(now, second.ready):
        return second
    return first

"""Which F or B a rank runs next: as written down beforehand, or by a limit on what is in flight."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from math import inf

from ..actions import Kind
from ..schedule import Schedule
from .list_schedule import Progress, Wanted
from .problem import Problem

__all__ = ["FixedOrder", "InFlight"]


class FixedOrder:
    """Every rank's F and B in a given order.

    Where that is allowed, and the rank would wait for long, B of another of its stages overtakes.
    """

    def __init__(
        self,
        problem: Problem,
        ranks: Sequence[Iterable[tuple[Kind, int]]],
        overtaking: bool = True,
    ) -> None:
        """Set the order.

        Args:
            problem: The pipeline.
            ranks: Kind and stage of every F and B of each rank; the k-th of a stage is microbatch
                k.
            overtaking: Whether B may overtake.
        """
        self._problem = problem
        self._left = [deque(order) for order in ranks]
        self._overtaking = overtaking
        self._overtaken: Counter[int] = Counter()

    @classmethod
    def of(cls, problem: Problem, schedule: Schedule, overtaking: bool = True) -> FixedOrder:
        """Keep the order of a schedule whose B and W are apart; W is left to fill gaps again."""
        ranks = ([a[:2] for a in rank if a.kind is not Kind.W] for rank in schedule)
        return cls(problem, tuple(ranks), overtaking)

    def next(self, progress: Progress, rank: int, now: float) -> Wanted | None:
        """Return what is first in the order of what is left."""
        left = self._left[rank]
        while left and self._has_overtaken(left[0]):
            self._overtaken[left.popleft()[1]] -= 1
        if not left:
            return None
        kind, stage = left[0]
        if kind is Kind.F:
            room = self._problem.activation[stage]
            return Wanted(kind, stage, progress.next_forward(stage), room)
        return self._backward(progress, stage)

    def instead(self, progress: Progress, rank: int, now: float) -> Wanted | None:
        """Return a B that is ready, whatever its place."""
        for stage in self._problem.stages[rank] if self._overtaking else ():
            wanted = self._backward(progress, stage)
            if wanted.ready <= now and progress.has_room(rank, wanted.room):
                return wanted
        return None

    def started(self, rank: int, wanted: Wanted) -> None:
        """Strike the action out, or note that it has overtaken."""
        if self._left[rank][0] == wanted[:2]:
            self._left[rank].popleft()
        else:
            self._overtaken[wanted.stage] += 1

    def _has_overtaken(self, action: tuple[Kind, int]) -> bool:
        kind, stage = action
        return kind is Kind.B and self._overtaken[stage] > 0

    def _backward(self, progress: Progress, stage: int) -> Wanted:
        room = max(0.0, self._problem.growth[stage])
        return Wanted(Kind.B, stage, progress.next_backward(stage), room)


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

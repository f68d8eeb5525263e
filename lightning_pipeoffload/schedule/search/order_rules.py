"""Rules for the next F or B of a rank: a fixed order, or a limit on what is in flight."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf

from .list_schedule import GapFiller, NextOperation
from .problem import ROUNDING, Order, SchedulingProblem


class FixedOrder:
    """Every rank's F and B in a given order.

    Where that is allowed, and the rank would wait for long, B of another of its stages overtakes.

    Args:
        ranks: Every F and B of each rank; the k-th of an operation is microbatch k.
        overtaking: Whether B may overtake.
    """

    def __init__(
        self, problem: SchedulingProblem, ranks: Iterable[Iterable[int]], overtaking: bool = True
    ) -> None:
        self._problem = problem
        self._left = [deque(order) for order in ranks]
        self._overtaking = overtaking
        self._overtaken: Counter[int] = Counter()

    @classmethod
    def of(cls, problem: SchedulingProblem, order: Order, overtaking: bool = True) -> FixedOrder:
        """Keep the F and B of an order; W is left to fill gaps again."""
        first_w = 2 * problem.num_stages
        return cls(problem, ([n for n, _ in rank if n < first_w] for rank in order), overtaking)

    def next(self, filler: GapFiller, rank: int, now: float) -> NextOperation | None:
        """Return the first of the remaining actions in the order."""
        left = self._left[rank]
        while left and self._overtaken.get(left[0]):
            self._overtaken[left.popleft()] -= 1
        return self._wanted(filler, left[0]) if left else None

    def alternative(self, filler: GapFiller, rank: int, now: float) -> NextOperation | None:
        """Return a B that is ready, wherever it is in the order."""
        last = 2 * self._problem.num_stages - 1
        for stage in self._problem.stages[rank] if self._overtaking else ():
            wanted = self._wanted(filler, last - stage)
            if wanted.ready <= now and filler.has_room(rank, wanted.room):
                return wanted
        return None

    def started(self, rank: int, operation: int) -> None:
        """Strike the operation out, or note that it has overtaken."""
        if self._left[rank][0] == operation:
            self._left[rank].popleft()
        else:
            self._overtaken[operation] += 1

    def _wanted(self, filler: GapFiller, operation: int) -> NextOperation:
        return NextOperation(
            operation, filler.next_ready_time(operation), self._problem.room(operation)
        )


class AlternatingOrder:
    """One F for each B, and no more F without B than a rank's depth.

    A rank with two stages takes their B in turn, and prefers F of the stage that has just had B, so
    that as much stays in flight on each. F of a stage leaves room for one microbatch in the rank's
    later stages, so that ranks never wait for each other's memory.

    Args:
        depths: The most F without B of every rank, at least its number of stages.
        punctuality: Seconds that a rank may have waited, in all, rather than start an F that makes
            the next B late.
    """

    def __init__(
        self, problem: SchedulingProblem, depths: Sequence[int], punctuality: float = 0.0
    ) -> None:
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
                room += problem.growth[stage]
                self._room[stage], self._num_later[stage] = room, num_later

    def next(self, filler: GapFiller, rank: int, now: float) -> NextOperation | None:
        """Return F or B in turn, what is ready before what is awaited."""
        stages = self._problem.stages[rank]
        # As long as B takes turns, the stage that had the last B has the next F.
        turned = self._last_backward[rank] == stages[0]
        backward = self._next_backward(filler, stages[::-1] if turned else stages, now)
        forward = self._next_forward(filler, rank, stages if turned else stages[::-1], now)
        if forward is None or backward is None:
            return forward or backward
        if forward.ready > now:
            return min(backward, forward, key=lambda wanted: wanted.ready)
        if backward.ready > now:
            late = now + filler.operations.seconds[forward.operation] > backward.ready
            waited = filler.idle[rank] + backward.ready - now
            return backward if late and waited <= self._punctuality else forward
        return forward if self._forward_is_due[rank] else backward

    def alternative(self, filler: GapFiller, rank: int, now: float) -> NextOperation | None:
        """Return nothing: what is ready is next already."""
        return None

    def started(self, rank: int, operation: int) -> None:
        """Count what is in flight, and take turns."""
        forward = operation < self._problem.num_stages
        self._num_in_flight[rank] += 1 if forward else -1
        self._forward_is_due[rank] = not forward
        if not forward:
            self._last_backward[rank] = 2 * self._problem.num_stages - 1 - operation

    def _next_forward(
        self, filler: GapFiller, rank: int, stages: Sequence[int], now: float
    ) -> NextOperation | None:
        first = None
        depth_left = self._depths[rank] - self._num_in_flight[rank]
        for stage in stages:
            ready, room = filler.next_ready_time(stage), self._room[stage]
            makes_room = ready <= now and filler.pending[rank]
            # Of the depth one is left for each of the rank's later stages.
            if ready == inf or self._num_later[stage] >= depth_left:
                continue
            if makes_room or filler.has_room(rank, room):
                first = _earlier(first, NextOperation(stage, ready, room), now)
        return first

    def _next_backward(
        self, filler: GapFiller, stages: Sequence[int], now: float
    ) -> NextOperation | None:
        first, last = None, 2 * self._problem.num_stages - 1
        for stage in stages:
            ready = filler.next_ready_time(last - stage)
            if ready < inf:
                wanted = NextOperation(last - stage, ready, self._problem.room(last - stage))
                first = _earlier(first, wanted, now)
        return first


class AlternatingSlices(AlternatingOrder):
    """The same for slices of microbatches, whose backward waits for the last slice's forward.

    A slice of a later microbatch leaves room for all of the first one whose forwards are not done,
    so that these never wait for memory.

    Args:
        limits: The most activations of every rank, as memory; at least those of one microbatch.
        punctuality: As for :class:`AlternatingOrder`.
    """

    def __init__(
        self, problem: SchedulingProblem, limits: Sequence[float], punctuality: float = 0.0
    ) -> None:
        super().__init__(problem, [], punctuality)
        self._limits = [limit * (1 + ROUNDING) for limit in limits]
        stages = range(problem.num_stages)
        # Of each stage the memory of a microbatch's first slices, by their number.
        self._of_first = [[*accumulate(problem.unit_growth[s], initial=0.0)] for s in stages]

    def _next_forward(
        self, filler: GapFiller, rank: int, stages: Sequence[int], now: float
    ) -> NextOperation | None:
        first = None
        for stage in stages:
            ready = filler.next_ready_time(stage)
            if ready == inf or not self._leaves_room(filler, rank, stage):
                continue
            room = self._growth(filler, stage) + self._problem.headroom[rank]
            if (ready <= now and filler.pending[rank]) or filler.has_room(rank, room):
                first = _earlier(first, NextOperation(stage, ready, room), now)
        return first

    def _growth(self, filler: GapFiller, stage: int) -> float:
        place = filler.num_started[stage] % self._problem.num_slices
        return self._problem.unit_growth[stage][place]

    def _leaves_room(self, filler: GapFiller, rank: int, stage: int) -> bool:
        stages, count = self._problem.stages[rank], self._problem.num_slices
        num_started = {s: filler.num_started[s] for s in stages}
        unfinished = min(num_started.values()) // count
        held = sum(self._kept(s, n) - self._freed(filler, s) for s, n in num_started.items())
        if num_started[stage] // count > unfinished:
            first = (unfinished + 1) * count
            later = sum(
                self._kept(s, max(first, n)) - self._kept(s, first) for s, n in num_started.items()
            )
            held = max(held, later + sum(self._of_first[s][-1] for s in stages))
        return held + self._growth(filler, stage) <= self._limits[rank]

    def _kept(self, stage: int, num_forward: int) -> float:
        """Return the memory of so many forwards of a stage."""
        microbatches, slices = divmod(num_forward, self._problem.num_slices)
        of_first = self._of_first[stage]
        return microbatches * of_first[-1] + of_first[slices]

    def _freed(self, filler: GapFiller, stage: int) -> float:
        """Return the memory of the forwards whose backward has begun, of the last slices first."""
        backward = filler.num_started[2 * self._problem.num_stages - 1 - stage]
        microbatches, slices = divmod(backward, self._problem.num_slices)
        of_first = self._of_first[stage]
        return (microbatches + 1) * of_first[-1] - of_first[self._problem.num_slices - slices]


def _earlier(first: NextOperation | None, second: NextOperation, now: float) -> NextOperation:
    """Return what is ready, the first one if both are, else what is awaited for less long."""
    if first is None or first.ready > max(now, second.ready):
        return second
    return first

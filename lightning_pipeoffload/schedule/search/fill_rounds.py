"""Put W into a written order of F and B by rounds: the k-th F or B of all ranks, then the next one.

Where every rank waits a little in each round, which of them may wait on without making the longest
span longer depends on how far the others are. By the clock the first rank is rounds ahead of the
last one, whose short waits still lie before it, and W makes it late for nothing; by rounds all have
come equally far. With many ranks that is what the bubble differs by; it is how Qi et al., "Zero
Bubble Pipeline Parallelism", ICLR 2024, fill theirs (section 3.1).
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from ..actions import Kind
from ..schedule import Schedule
from .fill_gaps import Filled, Wanted
from .fixed_order import FixedOrder
from .problem import Problem
from .progress import Progress

__all__ = ["fill_rounds"]


class _Rounds:
    """One run through an order, in which no B overtakes."""

    def __init__(self, problem: Problem, order: FixedOrder, is_patient_before_b: bool) -> None:
        self._problem, self._order = problem, order
        self._is_patient_before_b = is_patient_before_b
        self._progress = Progress(problem)
        self._num_done = [0] * problem.num_ranks
        self._agenda = [(0, rank) for rank in range(problem.num_ranks)]
        self._waiting: set[int] = set()
        self._longest = max(problem.work)

    def result(self, shorter_than: float) -> Filled:
        """Run until nothing is left to do, or it gets stuck or takes too long."""
        while self._agenda and self._longest < shorter_than:
            _, rank = heappop(self._agenda)
            wanted = self._order.next(self._progress, rank, self._progress.free[rank])
            if wanted is None:
                continue
            if wanted.ready == inf:
                self._waiting.add(rank)
            elif self._makes_room(rank, wanted):
                self._run(rank, wanted)
        return self._filled(shorter_than)

    def _filled(self, shorter_than: float) -> Filled:
        actions = self._progress.actions
        for rank, pending in enumerate(self._progress.pending):
            while pending:
                self._run_weight(rank)
        num_actions = sum(map(len, actions))
        complete = num_actions == 3 * self._problem.num_microbatches * self._problem.num_stages
        is_shorter = complete and self._longest < shorter_than
        return Filled(Schedule.of(actions) if is_shorter else None, self._longest, num_actions)

    def _makes_room(self, rank: int, wanted: Wanted) -> bool:
        """Run W until there is room, and those that fit before what is wanted can start."""
        pending = self._progress.pending[rank]
        while pending and (not self._has_room(rank, wanted) or self._fits_before(rank, wanted)):
            self._run_weight(rank)
        return self._has_room(rank, wanted)

    def _has_room(self, rank: int, wanted: Wanted) -> bool:
        return self._progress.has_room(rank, wanted.room)

    def _fits_before(self, rank: int, wanted: Wanted) -> bool:
        stage, _ = self._progress.pending[rank][0]
        return self._problem.backward_weight[stage] <= wanted.ready - self._progress.free[rank]

    def _run_weight(self, rank: int) -> None:
        self._progress.run_weight(rank, self._progress.free[rank])

    def _run(self, rank: int, wanted: Wanted) -> None:
        progress = self._progress
        if progress.pending[rank] and not self._may_wait(rank, wanted):
            self._run_weight(rank)
        start = max(progress.free[rank], wanted.ready)
        handed_on = progress.run(rank, wanted.kind, wanted.stage, start)
        self._order.started(rank, wanted)
        self._longest = max(self._longest, progress.idle[rank] + self._problem.work[rank])
        self._num_done[rank] += 1
        self._look_again(rank)
        if handed_on and handed_on[0] in self._waiting:
            self._waiting.remove(handed_on[0])
            self._look_again(handed_on[0])

    def _look_again(self, rank: int) -> None:
        heappush(self._agenda, (self._num_done[rank], rank))

    def _may_wait(self, rank: int, wanted: Wanted) -> bool:
        gap = max(0.0, wanted.ready - self._progress.free[rank])
        if self._is_patient_before_b and wanted.kind is Kind.B:
            return True
        return self._progress.idle[rank] + self._problem.work[rank] + gap <= self._longest


def fill_rounds(
    problem: Problem, order: FixedOrder, is_patient_before_b: bool, shorter_than: float = inf
) -> Filled:
    """Put W into an order of F and B, and time the result.

    W runs where the next F or B lacks memory, where it fits before the next one can start, and at
    the end; in a gap that is too short for it where waiting would make the longest span longer.
    Takes time proportional to the number of actions.

    Args:
        problem: The pipeline.
        order: The order, without leave to overtake; used up by the run.
        is_patient_before_b: Whether a rank waits for B through every gap that is too short for W.
        shorter_than: The run is given up when the longest span reaches this many seconds.
    """
    return _Rounds(problem, order, is_patient_before_b).result(shorter_than)

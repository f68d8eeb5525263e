"""An order of F and B that is written down beforehand, with leave for B to overtake."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from ..actions import Kind
from ..schedule import Schedule
from .fill_gaps import Wanted
from .problem import Problem
from .progress import Progress

__all__ = ["FixedOrder"]


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

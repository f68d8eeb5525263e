"""What a solver is asked, and what no plan can be faster than."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from ..actions import Kind
from ..costs import Costs
from ..placement import stages_on
from ..schedule import Schedule
from ..search.problem import ROUNDING
from ..simulation.memory import peak_memory
from ..simulation.simulate import simulate, steady_period

__all__ = ["PlanProblem", "earliest_end", "earliest_starts", "most_work"]


_Seconds = Mapping[Kind, Sequence[float]]


def earliest_starts(seconds: _Seconds, hops: Sequence[float]) -> dict[Kind, list[float]]:
    """Return when each stage can start its first F, B and W at the earliest.

    Args:
        seconds: What F, B and W of every stage take.
        hops: What the message after each stage takes.
    """
    forward = [0.0]
    for second, hop in zip(seconds[Kind.F], hops, strict=True):
        forward.append(forward[-1] + second + hop)
    last = len(hops) - 1
    backward = {last: forward[last] + seconds[Kind.F][last]}
    for stage in range(last - 1, -1, -1):
        backward[stage] = backward[stage + 1] + seconds[Kind.B][stage + 1] + hops[stage]
    backwards = [backward[stage] for stage in range(len(hops))]
    weights = [start + b for start, b in zip(backwards, seconds[Kind.B], strict=True)]
    return {Kind.F: forward[:-1], Kind.B: backwards, Kind.W: weights}


def earliest_end(
    seconds: _Seconds, hops: Sequence[float], placement: tuple[int, ...], num_microbatches: int
) -> float:
    """Return when a step can end at the earliest: when every rank has begun, and done its work.

    Args:
        seconds: What F, B and W of every stage take.
        hops: What the message after each stage takes.
        placement: The rank of every stage.
        num_microbatches: Microbatches of one step.
    """
    first = earliest_starts(seconds, hops)[Kind.F]

    def end(rank: int) -> float:
        start = min(first[stage] for stage in stages_on(placement, rank))
        return start + num_microbatches * _work(seconds, placement, rank)

    return max(map(end, range(max(placement) + 1)))


def most_work(seconds: _Seconds, placement: tuple[int, ...], num_microbatches: int) -> float:
    """Return what a step's work takes on the rank that has most of it.

    Args:
        seconds: What F, B and W of every stage take.
        placement: The rank of every stage.
        num_microbatches: Microbatches of one step.
    """
    ranks = range(max(placement) + 1)
    return num_microbatches * max(_work(seconds, placement, rank) for rank in ranks)


def _work(seconds: _Seconds, placement: tuple[int, ...], rank: int) -> float:
    stages = stages_on(placement, rank)
    return sum(of_kind[stage] for of_kind in seconds.values() for stage in stages)


@dataclass(frozen=True)
class PlanProblem:
    """What a plan is sought for.

    Attributes:
        num_microbatches: Microbatches of one step.
        placement: The rank of every stage.
        costs: The costs of the stages.
        memory_limit: The most memory of a rank; None: any.
        has_barrier: Whether no rank begins a step before all have ended the one before. Where they
            do not wait, what counts is the time from one step to the next.
    """

    num_microbatches: int
    placement: tuple[int, ...]
    costs: Costs
    memory_limit: float | None = None
    has_barrier: bool = True

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return max(self.placement) + 1

    @property
    def num_chunks(self) -> int:
        """Stages per rank."""
        return len(self.placement) // self.num_ranks

    def keeps(self, plan: Schedule) -> bool:
        """Whether a plan keeps the memory limit."""
        limit = inf if self.memory_limit is None else self.memory_limit * (1 + ROUNDING)
        return max(peak_memory(plan, self.costs)) <= limit

    @property
    def lower_bound(self) -> float:
        """Seconds that no plan takes less than."""
        seconds, hops = self.costs.compute(len(self.placement)), self.costs.hops(self.placement)
        if not self.has_barrier:
            return most_work(seconds, self.placement, self.num_microbatches)
        return earliest_end(seconds, hops, self.placement, self.num_microbatches)

    def seconds(self, plan: Schedule) -> float:
        """Return how long a plan takes, from one step to the next."""
        if not self.has_barrier:
            return steady_period(plan, self.costs, has_barrier=False)
        return simulate(plan, self.costs).makespan

"""A problem for the solver, and bounds that no plan is faster than."""

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
"""Seconds of F, B and W of every stage."""


def earliest_starts(seconds: _Seconds, hops: Sequence[float]) -> dict[Kind, list[float]]:
    """Return when each stage can start its first F, B and W at the earliest.

    Args:
        seconds: Seconds of F, B and W of every stage.
        hops: Seconds of the message after each stage.
    """
    forward = [0.0]
    for second, hop in zip(seconds[Kind.F], hops, strict=True):
        forward.append(forward[-1] + second + hop)
    last = len(hops) - 1
    backward = [forward[last] + seconds[Kind.F][last]]
    for stage in range(last - 1, -1, -1):
        backward.append(backward[-1] + seconds[Kind.B][stage + 1] + hops[stage])
    backward.reverse()
    weights = [start + b for start, b in zip(backward, seconds[Kind.B], strict=True)]
    return {Kind.F: forward[:-1], Kind.B: backward, Kind.W: weights}


def earliest_end(
    seconds: _Seconds, hops: Sequence[float], placement: tuple[int, ...], num_microbatches: int
) -> float:
    """Return when a step can end at the earliest: when every rank has begun, and done its work."""
    first = earliest_starts(seconds, hops)[Kind.F]

    def end(rank: int) -> float:
        start = min(first[stage] for stage in stages_on(placement, rank))
        return start + num_microbatches * _work(seconds, placement, rank)

    return max(map(end, range(max(placement) + 1)))


def most_work(seconds: _Seconds, placement: tuple[int, ...], num_microbatches: int) -> float:
    """Return the seconds of a step's work on the rank that has most of it."""
    ranks = range(max(placement) + 1)
    return num_microbatches * max(_work(seconds, placement, rank) for rank in ranks)


def _work(seconds: _Seconds, placement: tuple[int, ...], rank: int) -> float:
    stages = stages_on(placement, rank)
    return sum(of_kind[stage] for of_kind in seconds.values() for stage in stages)


@dataclass(frozen=True)
class PlanProblem:
    """A pipeline whose fastest plan is sought.

    Attributes:
        num_microbatches: Microbatches of one step.
        placement: The rank of every stage.
        costs: The costs of the stages.
        memory_limit: The most memory of a rank; None: any.
        has_barrier: Whether no rank begins a step before all have ended the one before. If not,
            the time from one step to the next is what counts.
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
        """Return the seconds from one step to the next."""
        if not self.has_barrier:
            return steady_period(plan, self.costs, has_barrier=False)
        return simulate(plan, self.costs).makespan

"""What a solver is asked: stages with their costs, ranks with a memory limit."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..costs import Costs
from ..lower_bound import earliest_end, most_work
from ..schedule import Schedule
from ..search.problem import ROUNDING
from ..simulation.memory import peak_memory
from ..simulation.simulate import simulate
from ..simulation.steady_step import steady_period

__all__ = ["PlanProblem"]


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

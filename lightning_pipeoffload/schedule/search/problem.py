"""The problem of a search for a schedule: stages with their costs, ranks with a memory limit.

A search works on integers. F and B of the stages are operations in the order of a microbatch's way
through the pipeline, so that each waits for the one before it; W follows in the order of B. Three
stages::

    stage      F 0 1 2   B 2 1 0   W 2 1 0
    operation    0 1 2     3 4 5     6 7 8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..actions import MEMORY_EFFECTS, Action, Kind, MemoryLimitError
from ..costs import COMPUTE_TIMES, Costs
from ..replay import replay_numbers
from ..schedule import Schedule, stages_on
from ..simulation.memory import memory_changes, part_sizes

# The rounding error of sums of memory, as a share of the limit.
ROUNDING = 1e-12

_LIFE = (Kind.F, Kind.B, Kind.W)

Pass = tuple[int, int]
"""An operation and a microbatch."""

Order = list[list[Pass]]
"""For every rank, its passes in the order in which it runs them."""


class Operations:
    """The operations of a pipeline, and their seconds.

    Attributes:
        num_stages: Stages on all ranks together.
        is_fused: Whether B and W are one action, BW, which is written as B.
        ranks: The rank of every F and B.
        seconds: Seconds of every F, B and W.
        latencies: Seconds from the end of every F and B until the next operation has its result.
    """

    def __init__(self, placement: Sequence[int], costs: Costs, is_fused: bool = False) -> None:
        self.num_stages = len(placement)
        self.is_fused = is_fused
        self.ranks = (*placement, *reversed(placement))
        f, b, w = costs.seconds_by_kind(self.num_stages).values()
        backward = [x + y for x, y in zip(b, w, strict=True)] if is_fused else list(b)
        self.seconds = [*f, *backward[::-1], *w[::-1]]
        latencies = costs.latencies(placement)
        self.latencies = [*latencies, *latencies[-2::-1], 0.0]

    def longest_span(self, order: Order) -> float:
        """Return the seconds from first start to last end of the rank where they are most."""
        count = 1 + max(microbatch for rank in order for _, microbatch in rank)
        num_waiting = 2 * self.num_stages - 1
        waits = [0, *[-count] * num_waiting, *[0] * self.num_stages]
        delays = [0.0, *self.latencies[:num_waiting], *[0.0] * self.num_stages]
        ranks = [[operation * count + m for operation, m in rank] for rank in order]
        replayed = replay_numbers(ranks, waits, [0] * len(waits), count)
        begins, _, last = replayed.time(
            [self.seconds[n] for n in replayed.operations],
            [delays[n] for n in replayed.operations],
            [0.0] * len(order),
        )
        first = (begins[replayed.ranks.index(rank)] for rank in range(len(order)))
        return max(end - begin for begin, end in zip(first, last, strict=True))

    def as_schedule(self, order: Order) -> Schedule:
        """Return an order as a schedule of actions."""
        stages = range(self.num_stages)
        backward = Kind.BW if self.is_fused else Kind.B
        names = [(Kind.F, stage) for stage in stages]
        names += [(kind, stage) for kind in (backward, Kind.W) for stage in reversed(stages)]
        return Schedule.of([Action(*names[n], m) for n, m in rank] for rank in order)


@dataclass(frozen=True)
class SchedulingProblem:
    """A pipeline to schedule.

    Attributes:
        placement: The rank of every stage, in model order.
        costs: Seconds and memory of the stages.
        memory_limit: The most memory of a rank, in the unit of the costs.
        num_slices: Slices of each microbatch, which the passes of an order count by.
    """

    placement: tuple[int, ...]
    num_microbatches: int
    costs: Costs
    memory_limit: float = float("inf")
    num_slices: int = 1

    @cached_property
    def operations(self) -> Operations:
        """The operations and their seconds, of slices the mean."""
        costs = _costs_of_mean_slice(self.costs, self.num_stages, self.num_slices)
        return Operations(self.placement, costs)

    @property
    def num_units(self) -> int:
        """Slices of all microbatches."""
        return self.num_microbatches * self.num_slices

    @cached_property
    def unit_seconds(self) -> list[list[float]]:
        """Seconds of every operation's slices, in the order in which they run."""
        sizes = self.num_stages, self.num_slices
        return self._by_operation(*(self.costs.per_slice(name, *sizes) for name in COMPUTE_TIMES))

    @cached_property
    def unit_growth(self) -> list[list[float]]:
        """Memory that every operation's slices add, in the order in which they run."""
        sizes = part_sizes(self.costs, self.num_stages, self.num_slices)
        changes = [
            [*memory_changes(life, sizes, MEMORY_EFFECTS)]
            for unit in range(self.num_stages * self.num_slices)
            for life in [[Action(kind, *divmod(unit, self.num_slices)) for kind in _LIFE]]
        ]
        return self._by_operation(*zip(*changes, strict=True))

    def _by_operation(
        self, forward: Sequence[float], backward: Sequence[float], weight: Sequence[float]
    ) -> list[list[float]]:
        """Divide costs of all stages' slices by operation; B and W are last to first in both."""
        count = self.num_slices
        firsts = range(0, len(forward), count)
        last_to_first = ([*of[::-1]] for of in (backward, weight))
        ordered = (forward, *last_to_first)
        return [[*of[first : first + count]] for of in ordered for first in firsts]

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return max(self.placement) + 1

    @property
    def num_stages(self) -> int:
        """Stages on all ranks together."""
        return len(self.placement)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of every rank, in model order."""
        return tuple(tuple(stages_on(self.placement, rank)) for rank in range(self.num_ranks))

    @cached_property
    def growth(self) -> list[float]:
        """Memory that every operation adds; negative where it frees some."""
        activation = self.costs.per_stage("activation", self.num_stages)
        residue = self.costs.per_stage("weight_residue", self.num_stages)
        b = [left - kept for left, kept in zip(residue, activation, strict=True)]
        return [*activation, *b[::-1], *(-left for left in residue[::-1])]

    def room(self, operation: int) -> float:
        """Return the memory that must be free before an F or B starts, of any slice."""
        if self.num_slices > 1:
            return max(0.0, *self.unit_growth[operation])
        return max(0.0, self.growth[operation])

    @cached_property
    def work(self) -> tuple[float, ...]:
        """Seconds of computing of every rank."""
        of_kinds = self.costs.seconds_by_kind(self.num_stages).values()
        return tuple(
            self.num_microbatches * sum(sum(of_kind[s] for s in stages) for of_kind in of_kinds)
            for stages in self.stages
        )

    @cached_property
    def headroom(self) -> tuple[float, ...]:
        """Memory that every rank keeps free, so that B can always run."""
        last = 2 * self.num_stages - 1
        return tuple(max(0.0, *(self.room(last - s) for s in of)) for of in self.stages)

    @property
    def smallest_limit(self) -> float:
        """The smallest memory limit that can be kept: one microbatch at a time on every rank."""
        return max(
            sum(self.growth[stage] for stage in stages) + headroom
            for stages, headroom in zip(self.stages, self.headroom, strict=True)
        )

    def limited_to(self, memory_limit: float, name: str) -> SchedulingProblem:
        """Return the same problem with a memory limit.

        Args:
            memory_limit: The most memory of a rank, in the unit of the costs.
            name: The name of the schedule, for the error.

        Raises:
            MemoryLimitError: Not even one microbatch at a time fits.
        """
        if memory_limit < self.smallest_limit:
            sentence = (
                "{limit} is less than the {needed} that one microbatch needs; use at least "
                f"{{needed}} for {name}, or more chunks of fewer layers"
            )
            raise MemoryLimitError(sentence, memory_limit, self.smallest_limit)
        return replace(self, memory_limit=memory_limit)

    def most_activations(self, rank: int) -> int:
        """Return how many activations of a rank's smallest stage fit, or all where they do."""
        memory = self.memory_limit * (1 + ROUNDING) - self.headroom[rank]
        activation = min(self.growth[stage] for stage in self.stages[rank])
        all_of_them = self.num_microbatches * len(self.stages[rank])
        return all_of_them if memory >= all_of_them * activation else int(memory / activation)


def _costs_of_mean_slice(costs: Costs, num_stages: int, num_slices: int) -> Costs:
    """Return the times of a slice of the mean length."""
    if num_slices == 1:
        return costs
    mean: dict[str, Any] = {
        name: [whole / num_slices for whole in costs.per_stage(name, num_stages)]
        for name in (*COMPUTE_TIMES, "communication")
    }
    return replace(costs, **mean)

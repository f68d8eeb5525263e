"""What a search for a schedule starts from: stages with their costs, ranks with a memory limit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..actions import MemoryLimitError
from ..costs import Costs
from ..placement import stages_on

__all__ = ["ROUNDING", "Problem"]

# What sums of memory may be off by, as a share of the limit.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Problem:
    """A pipeline to schedule, its costs resolved to one number for every stage.

    Attributes:
        placement: The rank of every stage, in model order.
        num_microbatches: Microbatches of one step.
        costs: Seconds and memory of the stages.
        memory_limit: The most memory of a rank, in the unit of the costs.
        forward: Seconds of F, of every stage.
        backward_input: Seconds of B.
        backward_weight: Seconds of W.
        hop: Seconds from a stage to the next one; 0 if both are on one rank.
        activation: Memory that F adds.
        growth: Memory that B adds; negative where it frees some.
        residue: Memory that W frees.
        stages: The stages of every rank, in model order.
        work: Seconds of computing of every rank.
        headroom: Memory that every rank keeps free, so that B can always run.
    """

    placement: tuple[int, ...]
    num_microbatches: int
    costs: Costs
    memory_limit: float = float("inf")
    forward: tuple[float, ...] = field(init=False)
    backward_input: tuple[float, ...] = field(init=False)
    backward_weight: tuple[float, ...] = field(init=False)
    hop: tuple[float, ...] = field(init=False)
    activation: tuple[float, ...] = field(init=False)
    growth: tuple[float, ...] = field(init=False)
    residue: tuple[float, ...] = field(init=False)
    stages: tuple[tuple[int, ...], ...] = field(init=False)
    work: tuple[float, ...] = field(init=False)
    headroom: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "activation"):
            self._set(name, self.costs.per_stage(name, self.num_stages))
        self._set("residue", self.costs.per_stage("weight_residue", self.num_stages))
        self._set("hop", self.costs.hops(self.placement))
        growth = zip(self.residue, self.activation, strict=True)
        self._set("growth", tuple(residue - activation for residue, activation in growth))
        ranks = range(self.num_ranks)
        self._set("stages", tuple(tuple(stages_on(self.placement, rank)) for rank in ranks))
        self._set("work", tuple(self._work_of(rank) for rank in ranks))
        self._set("headroom", tuple(max(0.0, *self._of(rank, self.growth)) for rank in ranks))

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return max(self.placement) + 1

    @property
    def num_stages(self) -> int:
        """Stages on all ranks together."""
        return len(self.placement)

    @property
    def smallest_limit(self) -> float:
        """The smallest memory limit that can be met: one microbatch at a time on every rank."""
        ranks = range(self.num_ranks)
        return max(sum(self._of(rank, self.activation)) + self.headroom[rank] for rank in ranks)

    def limited_to(self, memory_limit: float, name: str) -> Problem:
        """Return the same problem with a memory limit.

        Args:
            memory_limit: The most memory of a rank, in the unit of the costs.
            name: What the schedule is called in the error.

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
        activation = min(self._of(rank, self.activation))
        all_of_them = self.num_microbatches * len(self.stages[rank])
        return all_of_them if memory >= all_of_them * activation else int(memory / activation)

    def _work_of(self, rank: int) -> float:
        times = (self.forward, self.backward_input, self.backward_weight)
        return self.num_microbatches * sum(sum(self._of(rank, time)) for time in times)

    def _of(self, rank: int, values: tuple[float, ...]) -> list[float]:
        return [values[stage] for stage in self.stages[rank]]

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

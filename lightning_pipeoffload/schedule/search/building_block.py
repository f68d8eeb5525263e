"""Schedules as building blocks: the slots of one microbatch, repeated, and how long they take.

A microbatch has one way through a pipeline: F of every stage, then B of every stage backwards. A
building block says in which slot it takes each step of that way; the next microbatch does the same
an interval later. Two ranks in a V, with an interval of six slots; W goes where a slot is free::

    slot    0   1   2   3   4   5   6   7   8   9   10  11  12  13
    rank 0  0F0 .   .   3F0 3B0 .   0F1 0B0 .   3F1 3B1 .   .   0B1
    rank 1  .   1F0 2F0 .   .   2B0 1B0 1F1 2F1 .   .   2B1 1B1 .

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import accumulate, product
from typing import Any, NamedTuple

from ..costs import COMPUTE_TIMES, Costs
from ..schedule import Schedule
from .problem import Operations, Order
from .squeeze import POLICIES, Policy, squeeze


@dataclass(frozen=True)
class BuildingBlock:
    """When one microbatch takes each step of its way, and how long after it the next one does.

    Attributes:
        slots: Slot of each step: F of every stage in model order, then B of every stage backwards.
        interval: Slots between two microbatches.
    """

    slots: tuple[int, ...]
    interval: int

    def repeat(self, placement: Sequence[int], num_microbatches: int) -> Order:
        """Return the order of each rank's F and B when every microbatch follows the block."""
        timed: list[list[tuple[int, int, int]]] = [[] for _ in range(1 + max(placement))]
        for step, (slot, rank) in enumerate(
            zip(self.slots, (*placement, *reversed(placement)), strict=True)
        ):
            timed[rank] += [
                (slot + microbatch * self.interval, step, microbatch)
                for microbatch in range(num_microbatches)
            ]
        return [[(step, microbatch) for _, step, microbatch in sorted(rank)] for rank in timed]

    def peak(self, placement: Sequence[int]) -> int:
        """Return the most activations on any rank, were W always the slot after B."""
        lives: list[list[tuple[int, int]]] = [[] for _ in range(1 + max(placement))]
        for stage, rank in enumerate(placement):
            lives[rank].append((self.slots[stage], self.slots[-1 - stage] + 1))
        return max(self._most_alive(of_rank) for of_rank in lives)

    def _most_alive(self, lives: list[tuple[int, int]]) -> int:
        def alive_at(slot: int) -> int:
            ends = (
                (end - slot) // self.interval - (start - 1 - slot) // self.interval
                for start, end in lives
            )
            return sum(ends)

        return max(alive_at(start) for start, _ in lives)


def slots_from_hops(hops: Sequence[int]) -> tuple[int, ...]:
    """Return the slots of the steps of a way from the slots between each step and the next one."""
    return tuple(accumulate(hops, initial=0))


INTERVAL = 6
"""Slots between two microbatches: F, B and W of two stages."""


def v_block(
    down: Sequence[int],
    turns: Sequence[int],
    interval: int = INTERVAL,
    last_up: Sequence[int] | None = None,
) -> BuildingBlock:
    """Return the block with these slots between the steps of a microbatch.

    Args:
        down: Slots between each rank and the next one for what goes down the ranks: F of the first
            chunk and B of the second. F of the second chunk takes one slot on its way up.
        turns: Slots between the chunks: of F on the last rank, from F to B on the first rank, and
            of B on the last rank.
        interval: Slots between two microbatches.
        last_up: Slots between each rank and the next one for B of the first chunk, the last rank
            first; None: one.
    """
    up = (1,) * len(down)
    f_to_f, f_to_b, b_to_b = turns
    forwards, backwards = (*down, f_to_f, *up), (*down, b_to_b, *(last_up or up))
    return BuildingBlock(slots_from_hops((*forwards, f_to_b, *backwards)), interval)


# Fixed amounts of work, so that every rank and every run finds the same schedule.
VISITS_OF_TRIALS = 800_000
VARIANTS_OF_FINALISTS = 20
FEWEST = 3


class SearchSetting(NamedTuple):
    """The pipeline of a search, and its memory.

    Attributes:
        placement: The rank of every stage of the pipeline.
        costs: Seconds of the stages.
        memory: The most memory of a rank, in activations.
        residue: Memory from the end of B to the end of W, in activations.
        is_fused: Whether B and W are one action, BW.
    """

    placement: tuple[int, ...]
    costs: Costs
    memory: float
    residue: float = 1.0
    is_fused: bool = False

    def order_of(self, trial: BlockTrial, num_microbatches: int) -> Order:
        """Return the order that a trial gives."""
        order = trial.block.repeat(self.placement, num_microbatches)
        operations = Operations(self.placement, trial.times, self.is_fused)
        return squeeze(order, operations, self.memory, self.residue, trial.policy)


class BlockTrial(NamedTuple):
    """A block, and the times and policy with which to squeeze it."""

    block: BuildingBlock
    times: Costs
    policy: Policy


def best_schedule(
    blocks: Sequence[BuildingBlock], setting: SearchSetting, num_microbatches: int
) -> Schedule:
    """Return the fastest schedule that the blocks give.

    List scheduling is greedy and answers every small delay, where a regular order would absorb it:
    an order that was squeezed with simpler times is often faster in the real ones.

    Where the times are simple already, block after block is tried with as many policies as there is
    time for. Otherwise all blocks are tried with simple times, then the best of them, and the first
    one anyway, with other times and policies. The trials have no more than ``2 * num_ranks + 4``
    microbatches each, and together a fixed number of visits, so that on many ranks there are fewer
    of them: the time hardly grows with the ranks, and with the microbatches as that of a few
    squeezes does.

    Args:
        blocks: The blocks to try, the most promising first; none may need more than the memory.
        setting: Where the schedule is to run.
    """
    few = min(num_microbatches, len(setting.placement) + 4)
    operations = Operations(setting.placement, setting.costs, setting.is_fused)

    def best(trials: Iterable[BlockTrial], number: int, length: int) -> list[BlockTrial]:
        def span(trial: BlockTrial) -> float:
            return operations.longest_span(setting.order_of(trial, length))

        return nsmallest(number, trials, span)

    # A trial visits F, B and W of each stage and microbatch once.
    budget = VISITS_OF_TRIALS // (3 * len(setting.placement) * few)
    times = simpler_times(setting.costs)
    variants = list(product(times, POLICIES))
    if len(times) > 1 and len(blocks) > 1:
        first = [BlockTrial(block, *variants[0]) for block in blocks[: max(FEWEST, budget // 2)]]
        num_finalists = (budget - len(first)) // min(VARIANTS_OF_FINALISTS, len(variants))
        finalists = (trial.block for trial in best(first, max(FEWEST, num_finalists), few))
        blocks = list(dict.fromkeys([blocks[0], *finalists]))
    variants = variants[: max(FEWEST, budget // len(blocks))]
    finals = [BlockTrial(block, *variant) for block, variant in product(blocks, variants)]
    shortlist = best(finals[: max(FEWEST, budget)], FEWEST, few)
    orders = (setting.order_of(final, num_microbatches) for final in shortlist)
    return operations.as_schedule(min(orders, key=operations.longest_span))


def simpler_times(costs: Costs) -> list[Costs]:
    """Return times that are easier to squeeze, the most useful first, and the real ones last.

    Rounded ones keep the ratios of F, B and W in halves of the shortest; equal ones do not. Both
    are there without and with hops.
    """
    means = {name: _mean(getattr(costs, name)) for name in COMPUTE_TIMES}
    grain = min(filter(None, means.values()), default=1.0) / 2
    in_grains: dict[str, Any] = {name: grain * round(means[name] / grain) for name in means}
    mean: dict[str, Any] = dict.fromkeys(means, sum(means.values()) / 3 or 1.0)
    rounded, equal = replace(costs, **in_grains), replace(costs, **mean)
    times = [replace(rounded, communication=0.0), rounded]
    times += [replace(equal, communication=0.0), equal, costs]
    return list(dict.fromkeys(times))


def _mean(cost: float | Sequence[float]) -> float:
    return sum(cost) / len(cost) if isinstance(cost, Sequence) else cost

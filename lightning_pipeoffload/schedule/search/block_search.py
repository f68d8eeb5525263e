"""Choose among building blocks by trying them.

A block and a policy give an order; which is best depends on the times. Orders that were found for
simpler times are often better than those found for the times themselves, because list scheduling
is greedy: it answers every small delay, where a regular order would absorb it. So every block is
squeezed with equal times, with rounded ones and with the real ones, and what comes out is timed
with the real ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import nsmallest
from itertools import product
from typing import Any, NamedTuple

from ..costs import Costs
from ..schedule import Schedule
from .building_block import BuildingBlock
from .problem import Operations, Order
from .squeeze import POLICIES, Policy, squeeze

__all__ = ["SearchSetting", "best_schedule", "simpler_times"]

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
    names = ("forward", "backward_input", "backward_weight")
    means = {name: _mean(getattr(costs, name)) for name in names}
    grain = min(filter(None, means.values()), default=1.0) / 2
    in_grains: dict[str, Any] = {name: grain * round(means[name] / grain) for name in names}
    mean: dict[str, Any] = dict.fromkeys(names, sum(means.values()) / 3 or 1.0)
    rounded, equal = replace(costs, **in_grains), replace(costs, **mean)
    times = [replace(rounded, communication=0.0), rounded]
    times += [replace(equal, communication=0.0), equal, costs]
    return list(dict.fromkeys(times))


def _mean(cost: float | Sequence[float]) -> float:
    return sum(cost) / len(cost) if isinstance(cost, Sequence) else cost

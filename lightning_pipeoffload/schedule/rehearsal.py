"""Choose among building blocks by trying them.

A block and a policy give an order; which is best depends on the times. Orders that were found for
simpler times are often better than those found for the times themselves, because a list scheduling
is greedy: it answers every small delay, where a regular order would absorb it. So every block is
squeezed with equal times, with rounded ones and with the real ones, and what comes out is timed
with the real ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import nsmallest
from itertools import product
from typing import NamedTuple

from .building_block import BuildingBlock, Order
from .costs import Costs
from .route import Route
from .schedule import Schedule
from .squeeze import POLICIES, Policy, squeeze

__all__ = ["Stage", "best_schedule"]

NUM_FINALISTS = 8


class Stage(NamedTuple):
    """Where a schedule is to run, and what it may use.

    Attributes:
        placement: The rank of every stage of the pipeline.
        costs: Seconds of the stages.
        memory: The most memory of a rank, in activations.
        residue: What is alive from the end of B to the end of W, in activations.
        is_fused: Whether B and W are one action, BW.
    """

    placement: tuple[int, ...]
    costs: Costs
    memory: float
    residue: float = 1.0
    is_fused: bool = False

    def play(self, rehearsed: Rehearsal, num_microbatches: int) -> Order:
        """Return the order that a rehearsal gives."""
        order = rehearsed.block.repeat(self.placement, num_microbatches)
        route = Route(self.placement, rehearsed.times, self.is_fused)
        return squeeze(order, route, self.memory, self.residue, rehearsed.policy)


class Rehearsal(NamedTuple):
    """A block, and the times and policy with which to squeeze it."""

    block: BuildingBlock
    times: Costs
    policy: Policy


def best_schedule(blocks: Sequence[BuildingBlock], stage: Stage, num_microbatches: int) -> Schedule:
    """Return the fastest schedule that the blocks give.

    All blocks are tried with simple times, the best of them with all times and policies: about as
    many squeezes as there are blocks and 160 more, of no more than ``2 * num_ranks + 4``
    microbatches each.

    Args:
        blocks: What to try; none may have more in flight than the memory holds.
        stage: Where the schedule is to run.
        num_microbatches: Microbatches of one step.
    """
    few = min(num_microbatches, len(stage.placement) + 4)
    route = Route(stage.placement, stage.costs, stage.is_fused)

    def best(rehearsals: Iterable[Rehearsal], number: int, length: int) -> list[Rehearsal]:
        return nsmallest(number, rehearsals, lambda r: route.longest_span(stage.play(r, length)))

    times = _simpler_times(stage.costs)
    if len(blocks) > NUM_FINALISTS:
        trials = [Rehearsal(block, times[0], POLICIES[0]) for block in blocks]
        blocks = [trial.block for trial in best(trials, NUM_FINALISTS, few)]
    finals = [Rehearsal(*final) for final in product(blocks, times, POLICIES)]
    winner = best(best(finals, 3, few), 1, num_microbatches)[0]
    return route.as_schedule(stage.play(winner, num_microbatches))


def _simpler_times(costs: Costs) -> list[Costs]:
    """Return times that are easier to squeeze, the simplest first, and the real ones last."""
    names = ("forward", "backward_input", "backward_weight")
    means = {name: _mean(getattr(costs, name)) for name in names}
    grain = min(means.values()) / 2 or 1.0
    rounded = replace(costs, **{name: grain * round(means[name] / grain) for name in names})
    equal = replace(costs, **dict.fromkeys(names, _mean(tuple(means.values())) or 1.0))
    without_hops = [replace(times, communication=0.0) for times in (rounded, equal)]
    return list(dict.fromkeys([*without_hops, rounded, equal, costs]))


def _mean(cost: float | Sequence[float]) -> float:
    return sum(cost) / len(cost) if isinstance(cost, Sequence) else cost

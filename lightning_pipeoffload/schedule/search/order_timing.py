"""What the visits of an order cost, and how long the order takes.

A search tries hundreds of orders, so this is a leaner form of the simulator: visits are pairs of
numbers, and only the time of the longest rank comes out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ..actions import Action, Kind
from ..costs import Costs
from ..schedule import Schedule
from .building_block import Order, Visit, ranks_of_steps

__all__ = ["OrderTiming"]


class OrderTiming:
    """The steps of a microbatch's way through the pipeline, and their seconds.

    Steps ``0..S-1`` are F of the stages in model order, ``S..2S-1`` their B backwards. The W that
    belongs to B at step ``s`` has the number ``s + S``; it is no step, nobody waits for it.

    Args:
        placement: The rank of every stage.
        costs: Seconds of the stages.
        is_fused: Whether B and W are one action, BW.
    """

    def __init__(self, placement: Sequence[int], costs: Costs, is_fused: bool = False) -> None:
        self.num_stages = len(placement)
        self.is_fused = is_fused
        self.ranks = ranks_of_steps(placement)
        self.seconds = self._seconds(costs)
        hops = costs.hops(placement)
        self.hops = [*hops, *hops[-2::-1], 0.0]

    def _seconds(self, costs: Costs) -> list[float]:
        names = ("forward", "backward_input", "backward_weight")
        f, b, w = (costs.per_stage(name, self.num_stages) for name in names)
        backward = [x + y for x, y in zip(b, w, strict=True)] if self.is_fused else list(b)
        return [*f, *backward[::-1], *w[::-1]]

    def longest_span(self, order: Order) -> float:
        """Return the seconds from first start to last end of the rank where they are most.

        Args:
            order: Passes of every rank that do not wait for each other in a circle; those of a step
                in the order of the microbatches.
        """
        arrivals: list[list[float]] = [[] for _ in self.hops]
        waiting: defaultdict[Visit, list[int]] = defaultdict(list)
        clocks, starts = [0.0] * len(order), [0.0] * len(order)
        visits = [iter(enumerate(rank)) for rank in order]
        blocked: list[tuple[int, Visit] | None] = [None] * len(order)
        runnable = list(range(len(order)))
        while runnable:
            rank = runnable.pop()
            clock = clocks[rank]
            while current := blocked[rank] or next(visits[rank], None):
                blocked[rank] = current
                index, (step, microbatch) = current
                if 0 < step < 2 * self.num_stages:
                    arrived = arrivals[step - 1]
                    if microbatch >= len(arrived):
                        waiting[step - 1, microbatch].append(rank)
                        break
                    clock = max(clock, arrived[microbatch])
                blocked[rank] = None
                if index == 0:
                    starts[rank] = clock
                clock += self.seconds[step]
                if step < 2 * self.num_stages:
                    arrivals[step].append(clock + self.hops[step])
                    runnable += waiting.pop((step, microbatch), ())
            clocks[rank] = clock
        return max(end - start for end, start in zip(clocks, starts, strict=True))

    def as_schedule(self, order: Order) -> Schedule:
        """Return an order as a schedule of actions."""
        return Schedule.of([self._action(*visit) for visit in rank] for rank in order)

    def _action(self, step: int, microbatch: int) -> Action:
        num_stages = self.num_stages
        if step < num_stages:
            return Action(Kind.F, step, microbatch)
        if step < 2 * num_stages:
            kind = Kind.BW if self.is_fused else Kind.B
            return Action(kind, 2 * num_stages - 1 - step, microbatch)
        return Action(Kind.W, 3 * num_stages - 1 - step, microbatch)

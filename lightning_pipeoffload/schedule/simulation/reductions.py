"""The lane of each rank on which its stages' gradients are reduced, while a schedule is timed."""

from __future__ import annotations

from collections.abc import Mapping

from ..actions import Action
from ..costs import Costs
from ..schedule import Schedule
from ..tails import tails
from ..timeline import REDUCE_LANE, Event

__all__ = ["SimulatedReductions"]


class SimulatedReductions:
    """When the lane of each rank is free.

    The W's of a tail complete equal shares of the stage's gradients, so a REDUCE has as many
    shares, and each waits for its W and for the share before it. Without a tail it is one share.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        """Start with free lanes.

        Args:
            schedule: What is timed.
            costs: Seconds of the reductions.
        """
        self._seconds = costs.per_stage("reduce", schedule.num_stages)
        self._weights = {tail.reduction: tail.weights for rank in schedule for tail in tails(rank)}
        self._free = [0.0] * schedule.num_ranks

    def run(self, rank: int, action: Action, now: float, ended: Mapping[Action, float]) -> Event:
        """Return the event of a REDUCE to which its rank has come.

        Args:
            rank: The rank.
            action: The REDUCE.
            now: When the rank has come to it.
            ended: When actions before it have ended, its tail's among them.
        """
        completed = [ended[weight] for weight in self._weights[action]] or [now]
        share = self._seconds[action.stage] / len(completed)
        start = end = max(self._free[rank], completed[0])
        for time in completed:
            end = max(end, time) + share
        self._free[rank] = end
        return Event(rank, REDUCE_LANE, action, start, end)

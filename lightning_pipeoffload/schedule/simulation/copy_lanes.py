"""The copy lanes of every rank while a schedule is timed: when what is copied, and who waits.

What B needs comes back first, and B waits for no more::

    h2d      RELOAD  [ for B | for W ]
    compute                  [== B ==][== W ==]
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator

from ..actions import RELOADS, Action, Kind
from ..costs import Costs
from ..timeline import COMPUTE_LANE, OFFLOAD_LANE, RELOAD_LANE, Event
from .intervals import Interval, earliest

__all__ = ["SimulatedCopies"]

_WAITS_FOR = {
    Kind.FREE: (Kind.OFFLOAD,),
    Kind.FREE_W: (Kind.OFFLOAD_W,),
    Kind.B: (Kind.RELOAD, Kind.RELOAD_B),
    Kind.BW: (Kind.RELOAD,),
    Kind.W: (Kind.RELOAD, Kind.RELOAD_W),
}


class SimulatedCopies:
    """When the copy lanes of each rank are free, and when each copy has ended."""

    def __init__(
        self,
        num_ranks: int,
        costs: Costs,
        seconds: dict[Action, float],
        seconds_for_w: dict[Action, float],
    ) -> None:
        """Start with free lanes.

        Args:
            num_ranks: Ranks of the pipeline.
            costs: How many copies run at a time.
            seconds: What every copy of the schedule takes.
            seconds_for_w: What W's part of a RELOAD takes, where it has one: the last.
        """
        self.in_use = bool(seconds)
        self._seconds = seconds
        self._seconds_for_w = seconds_for_w
        self._free = [[0.0] * costs.copy_lanes for _ in range(num_ranks)]
        self._ranks_per_link = costs.ranks_per_link
        self._links: defaultdict[tuple[int, bool], list[Interval]] = defaultdict(list)
        self._ended: dict[Action, float] = {}

    def wait(self, action: Action, start: float) -> float:
        """Return when an action can start whose rank has come to it at ``start``."""
        for kind in _WAITS_FOR.get(action.kind, ()):
            copy = action._replace(kind=kind)
            ended = self._ended.get(copy, 0.0)
            if action.kind is Kind.B:
                ended -= self._seconds_for_w.get(copy, 0.0)
            start = max(start, ended)
        return start

    def start(self, rank: int, action: Action, now: float) -> Iterator[Event]:
        """Yield the events of an action that starts a copy or ends one; others have none."""
        if action.kind in RELOADS or action.kind in (Kind.FREE, Kind.FREE_W):
            yield Event(rank, COMPUTE_LANE, action, now, now)
        if action in self._seconds:
            reload = action.kind in RELOADS
            free = self._free[rank]
            # A device with one lane copies both ways on it, in turns.
            lane = int(reload) % len(free)
            start = max(now, free[lane], self._offloaded(action) if reload else 0.0)
            start = self._turn(rank, reload, start, self._seconds[action])
            end = self._ended[action] = free[lane] = start + self._seconds[action]
            yield Event(rank, RELOAD_LANE if reload else OFFLOAD_LANE, action, start, end)

    def _offloaded(self, reload: Action) -> float:
        kinds = (Kind.OFFLOAD, Kind.OFFLOAD_W)
        return max(self._ended.get(reload._replace(kind=kind), 0.0) for kind in kinds)

    def _turn(self, rank: int, reload: bool, start: float, seconds: float) -> float:
        """Take the first time from ``start`` on that other ranks leave of a shared link.

        The ranks are not timed in the order of time, so one may find a later time taken.
        """
        if self._ranks_per_link == 1:
            return start
        taken = self._links[rank // self._ranks_per_link, reload]
        start = earliest(start, seconds, taken)
        insort(taken, (start, start + seconds))
        return start

"""The lanes beside compute while a schedule is timed: copies, the links they share, and reductions.

What B needs comes back first, and B waits for no more::

    h2d      RELOAD  [ for B | for W ]
    compute                  [== B ==][== W ==]
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..actions import RELOADS, Action, Kind
from ..costs import Costs
from ..passes.reduce import tails
from ..schedule import Schedule
from ..timeline import COMPUTE_LANE, OFFLOAD_LANE, REDUCE_LANE, RELOAD_LANE, TOLERANCE, Event

__all__ = ["Interval", "SimulatedCopies", "SimulatedReductions", "disjoint", "earliest", "latest"]


Interval = tuple[float, float]
"""From a time until another, in seconds."""


def disjoint(taken: Iterable[Interval]) -> list[Interval]:
    """Return the same times in intervals that do not meet, by their start."""
    intervals: list[Interval] = []
    for start, end in sorted(taken):
        if intervals and start <= intervals[-1][1] + TOLERANCE:
            intervals[-1] = intervals[-1][0], max(end, intervals[-1][1])
        else:
            intervals.append((start, end))
    return intervals


def earliest(start: float, seconds: float, taken: Sequence[Interval]) -> float:
    """Return the first time from ``start`` on from which so many seconds are free.

    Args:
        start: Not before this.
        seconds: How long.
        taken: Disjoint, by their start.
    """
    for taken_from, taken_until in taken[max(0, bisect_left(taken, (start,)) - 1) :]:
        if start + seconds <= taken_from + TOLERANCE:
            break
        start = max(start, taken_until)
    return start


def latest(end: float, seconds: float, taken: Sequence[Interval]) -> float:
    """Return the last time from which so many seconds are free that are over at ``end``.

    It may be before 0.

    Args:
        end: Not after this.
        seconds: How long.
        taken: Disjoint, by their start.
    """
    for index in range(bisect_left(taken, (end,)) - 1, -1, -1):
        taken_from, taken_until = taken[index]
        if end - seconds >= taken_until - TOLERANCE:
            break
        end = min(end, taken_from)
    return end - seconds


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

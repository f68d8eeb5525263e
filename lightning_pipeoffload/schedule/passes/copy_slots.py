"""The ways on which values can go to the host and back, and when the copies of a rank run.

Between F and B all of it can be away. What W alone needs can stay away until W, and between B and W
what waits for W can go (again). Each way is a few copies, each with the time that there is for it.
As in the paper (Wan et al., "PipeOffload", ICML 2025): copies back take the latest slot that is
early enough, from the last to the first; then copies to the host take the earliest that is free.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..actions import ACTIVATION, RELOADS, WAITING, Action, Kind, Part
from ..costs import Costs
from ..simulation.lanes import Interval, disjoint, earliest, latest
from ..simulation.memory import PartSizes, part_sizes
from ..timeline import TOLERANCE, Event

__all__ = [
    "Copy",
    "KeptValues",
    "Leg",
    "PARTS",
    "QUEUE",
    "RankTimes",
    "Route",
    "Routes",
    "Turns",
    "WHOLE",
    "kept_activations",
    "place_copies",
]


WHOLE = frozenset({Kind.OFFLOAD, Kind.RELOAD})
PARTS = WHOLE | {Kind.RELOAD_B, Kind.RELOAD_W}
QUEUE = PARTS | {Kind.OFFLOAD_W}


@dataclass(frozen=True, eq=False)
class Leg:
    """One copy of a route.

    Attributes:
        action: What starts it.
        seconds: How long it takes.
        ready: When it can start.
        due: When it must have ended.
    """

    action: Action
    seconds: float
    ready: float
    due: float


Route = tuple[Leg, ...]
"""The copies of one way, in their order."""


@dataclass(frozen=True, eq=False)
class KeptValues:
    """What a stage keeps of a microbatch.

    Attributes:
        stage: The stage.
        microbatch: The microbatch.
        lifespan: Seconds from the end of F to the start of W, or of BW.
        routes: Those that it has time for were the lanes its own, what spares most memory first.
    """

    stage: int
    microbatch: int
    lifespan: float
    routes: tuple[Route, ...]

    def ways(self, allowed: frozenset[Kind]) -> tuple[Route, ...]:
        """Return its routes that take none but allowed kinds of copies."""
        return tuple(
            route for route in self.routes if all(leg.action.kind in allowed for leg in route)
        )


def kept_activations(events: list[Event], costs: Costs, num_stages: int) -> Iterator[KeptValues]:
    """Yield what a rank keeps, in the order in which B or BW comes to it.

    Args:
        events: When the rank computes what.
        costs: Seconds of copies, and the sizes of what they copy.
        num_stages: The number of stages of all ranks.
    """
    sizes = part_sizes(costs, num_stages)
    there = costs.per_stage("offload", num_stages)
    back = costs.per_stage("reload", num_stages)
    when = {event.action: event for event in events}
    for action, event in when.items():
        if action.kind in (Kind.B, Kind.BW):
            forward = when[action._replace(kind=Kind.F)]
            last = when.get(action._replace(kind=Kind.W), event)
            copies = _Copies(action, sizes[action.stage], there[action.stage], back[action.stage])
            found = copies.routes(forward.end, event, last.start)
            routes = tuple(route for route in found if _is_in_time(route))
            yield KeptValues(*action[1:], last.start - forward.end, routes)


@dataclass(frozen=True)
class _Copies:
    """What the copies of one stage and microbatch take."""

    action: Action
    sizes: PartSizes
    offload: float
    reload: float

    def routes(self, saved: float, backward: Event, weight: float) -> Iterator[Route]:
        """Yield every route, what spares most memory first."""
        away = self._leg(Kind.OFFLOAD, self.offload, ACTIVATION, saved, backward.start)
        whole = self._leg(Kind.RELOAD, self.reload, ACTIVATION, saved, backward.start)
        if backward.action.kind is Kind.B:
            between = backward.end, weight
            first = self._leg(Kind.RELOAD_B, self.reload, Part.FOR_B, saved, backward.start)
            rest = self._leg(Kind.RELOAD_W, self.reload, Part.FOR_W, *between)
            queue = self._leg(Kind.RELOAD_W, self.reload, WAITING, *between)
            gradient = self._leg(Kind.OFFLOAD_W, self.offload, Part.GRADIENT, *between)
            waiting = self._leg(Kind.OFFLOAD_W, self.offload, WAITING, *between)
            yield away, first, gradient, queue
            if self.sizes[Part.FOR_W]:
                yield away, first, rest
        yield away, whole
        if backward.action.kind is Kind.B:
            yield waiting, queue

    def _leg(self, kind: Kind, seconds: float, parts: Part, ready: float, due: float) -> Leg:
        activation = self.sizes[ACTIVATION]
        share = self.sizes[parts] / activation if activation else 1.0
        return Leg(self.action._replace(kind=kind), seconds * share, ready, due)


def _is_in_time(route: Route) -> bool:
    """Whether the copies that share the time between two actions fit into it."""
    windows: defaultdict[tuple[float, float], float] = defaultdict(float)
    for leg in route:
        windows[leg.ready, leg.due] += leg.seconds
    return all(seconds <= due - ready + TOLERANCE for (ready, due), seconds in windows.items())


Routes = Mapping[KeptValues, Route]
"""On which way each of a rank's activations goes that goes at all."""


class Copy(NamedTuple):
    """A copy and when it runs."""

    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Turns:
    """When a rank may copy on a link that it shares with its neighbours.

    They take turns: while one copies to the host, the next one copies back. As in the paper, where
    two do. Nothing holds a rank to its turn, so that a plan leaves a turn of time before what waits
    for a copy.

    Attributes:
        rank: Which of the ranks of the link it is, from 0 on.
        num_ranks: How many share the link.
        seconds: The seconds of one turn.
    """

    rank: int = 0
    num_ranks: int = 1
    seconds: float = 0.0

    @property
    def slack(self) -> float:
        """Seconds to leave between a copy and what waits for it."""
        return self.seconds if self.num_ranks > 1 else 0.0

    def of_others(self, reload: bool, end: float) -> list[Interval]:
        """Return when others copy in one direction, up to ``end``."""
        if self.num_ranks == 1 or not self.seconds:
            return []
        first = (self.rank + reload) % self.num_ranks + 1 - self.num_ranks
        free = range(first, int(end / self.seconds) + 2, self.num_ranks)
        return [(self.seconds * turn, self.seconds * (turn + self.num_ranks - 1)) for turn in free]


class RankTimes:
    """Where in the order of a rank's actions something at a time belongs.

    Args:
        events: When the rank computes what.
        slack: Seconds to leave after a copy.
    """

    def __init__(self, events: list[Event], slack: float) -> None:
        self._slack = slack
        self._starts = [event.start for event in events]
        self._ends = [event.end for event in events]

    @property
    def end(self) -> float:
        """When the rank has computed everything."""
        return self._ends[-1]

    def place_of_start(self, copy: Copy) -> int:
        """Return before which action a copy is started: the one that runs then, or the next."""
        return bisect_right(self._ends, copy.start + TOLERANCE)

    def place_of_end(self, copy: Copy) -> int:
        """Return before which action the device is rid of what was copied."""
        return bisect_left(self._starts, copy.end + self._slack - TOLERANCE)


def place_copies(
    ways: Mapping[KeptValues, tuple[Route, ...]], times: RankTimes, num_lanes: int, turns: Turns
) -> tuple[list[Copy], Routes]:
    """Return the copies of one rank by their start, and the routes that they are of.

    Where there is no time for all of them, those with the shortest lifespans take the next of their
    routes, or stay on the device after the last.

    Args:
        ways: What is to be copied, with its routes, the first of which is tried first.
        times: The times of the rank's actions.
        num_lanes: 1 where both directions take turns, 2 where each has a lane.
        turns: When it may copy.
    """
    end = times.end
    left = {kept: list(routes) for kept, routes in ways.items() if routes}
    while left:
        chosen = {kept: routes[0] for kept, routes in left.items()}
        copies = _place(chosen.values(), num_lanes, turns, end)
        late = [kept for kept, route in chosen.items() if not _in_time(route, copies, times)]
        if not late:
            return sorted(copies.values()), chosen
        # A few at a time, for each that gives way leaves room in which others are in time.
        for kept in sorted(late, key=lambda kept: kept.lifespan)[: max(1, len(late) // 4)]:
            left[kept].pop(0)
        left = {kept: routes for kept, routes in left.items() if routes}
    return [], {}


def _place(routes: Iterable[Route], num_lanes: int, turns: Turns, until: float) -> dict[Leg, Copy]:
    pairs = [pair for route in routes for pair in zip(route, (*route[1:], None), strict=True)]
    back = [leg for leg, _ in pairs if leg.action.kind in RELOADS]
    there = [(leg, after) for leg, after in pairs if leg.action.kind not in RELOADS]
    copies: dict[Leg, Copy] = {}
    taken = turns.of_others(reload=True, end=until)
    limit = float("inf")
    # From the last one on, each as late as can be: it takes device memory from its start.
    for leg in sorted(back, key=lambda leg: leg.due, reverse=True):
        limit = latest(min(limit, leg.due - turns.slack), leg.seconds, taken)
        copies[leg] = Copy(limit, limit + leg.seconds, leg.action)
    taken = turns.of_others(reload=False, end=until)
    if num_lanes == 1:
        taken = disjoint([*taken, *(copy[:2] for copy in copies.values())])
    free = 0.0
    # Each as early as can be: its device memory is free at its end.
    for leg, after in sorted(there, key=lambda pair: pair[0].ready):
        start = earliest(max(free, leg.ready), leg.seconds, taken)
        copies[leg] = Copy(start, start + leg.seconds, leg.action)
        if after is None or start + leg.seconds <= copies[after].start + TOLERANCE:
            free = start + leg.seconds  # Others do not wait for what is late.
    return copies


def _in_time(route: Route, copies: Mapping[Leg, Copy], times: RankTimes) -> bool:
    """Whether each copy runs in its time, and each stay on the host lasts for an action or more."""
    for leg, following in zip(route, route[1:], strict=False):
        copy, after = copies[leg], copies[following]
        if after.start < following.ready - TOLERANCE:
            return False
        leaves = leg.action.kind not in RELOADS
        if leaves and times.place_of_end(copy) >= times.place_of_start(after):
            return False
    return True

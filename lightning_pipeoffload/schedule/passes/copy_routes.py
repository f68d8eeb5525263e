"""The ways on which what a stage keeps of a microbatch can go to the host and come back in time.

Between F and B all of it can be away. What W alone needs can stay away until W, and between B and W
what waits for W can go (again). Each way is a few copies, each with the time that there is for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ..actions import ACTIVATION, WAITING, Action, Kind, Part
from ..costs import Costs
from ..simulation.memory import PartSizes, part_sizes
from ..timeline import TOLERANCE, Event

__all__ = ["PARTS", "QUEUE", "WHOLE", "KeptValues", "Leg", "Route", "kept_activations"]

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

"""Which activations of one rank go to the host, by the latest times of its forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ..actions import COMPUTE, COPIES, MEMORY_EFFECTS, Action, Kind
from ..costs import Costs
from ..schedule import Schedule
from ..simulation.memory import memory_changes, part_sizes
from ..timeline import COMPUTE_LANE, Event, Timeline
from .copy_slots import (
    PARTS,
    QUEUE,
    WHOLE,
    Copy,
    KeptValues,
    RankTimes,
    Routes,
    Turns,
    kept_activations,
    place_copies,
)

__all__ = ["RankOffload", "RankPlan", "postponed"]


_FREED_BY = {Kind.OFFLOAD: Kind.FREE, Kind.OFFLOAD_W: Kind.FREE_W}
"""What drops from the device what a copy has brought to the host."""

_NUM_FRACTIONS = 16  # Fractions of a number of activations that are tried for the best.


@dataclass(frozen=True)
class RankPlan:
    """What a rank does, copies among it.

    Attributes:
        actions: All of its actions in order.
        copies: When it copies what.
        peak: Its largest memory.
        wanted: How many activations were to be offloaded.
        chosen: How many of them were tried.
        num_moved: How many are on the host for a while.
        offloaded: How many are between F and B.
        queued: How many of them have what waits for W offloaded, between B and W.
        too_short: How many stay because there is no time for a copy there and back.
    """

    actions: tuple[Action, ...]
    copies: tuple[Copy, ...]
    peak: float
    wanted: int
    chosen: int
    num_moved: int
    offloaded: int
    queued: int
    too_short: int

    @property
    def rating(self) -> tuple[float, float]:
        """The peak and, where that is equal, the seconds of copies: less is better."""
        return float(f"{self.peak:.9g}"), sum(copy.end - copy.start for copy in self.copies)


class RankOffload:
    """A rank's actions in time, to which copies can be added.

    Args:
        events: When the rank computes what.
        costs: The costs of the stages.
        num_stages: The number of stages of all ranks.
        turns: When the rank may copy.
    """

    def __init__(self, events: list[Event], costs: Costs, num_stages: int, turns: Turns) -> None:
        self._events = events
        self._num_lanes = costs.copy_lanes
        self._sizes = part_sizes(costs, num_stages)
        self._turns = turns
        self._times = RankTimes(events, turns.slack)
        self._kept = list(kept_activations(events, costs, num_stages))

    @property
    def num_activations(self) -> int:
        """How many activations the rank keeps in a step."""
        return len(self._kept)

    def plan(self, count: int) -> RankPlan:
        """Offload so many activations, on the routes that leave the smallest peak.

        Args:
            count: How many, those of the longest-lived stages first.
        """
        chosen = list(_longest(self._stages, count))
        plans = (self._plan(chosen, allowed) for allowed in self._modes)
        return min(plans, key=lambda plan: plan.rating)

    def most(self, count: int) -> RankPlan:
        """Offload so many activations, or as many fewer as leave a smaller peak.

        More than there is time for are in each other's way.
        """
        best = self.plan(count)
        if best.num_moved + best.too_short < count:
            fewer = (self.plan(count * part // _NUM_FRACTIONS) for part in range(_NUM_FRACTIONS))
            best = min((best, *fewer), key=lambda plan: plan.rating)
        return replace(best, wanted=count)

    def least(self, memory_limit: float) -> RankPlan:
        """Offload as few activations as a limit asks for; where none will do, the most that helps.

        Args:
            memory_limit: The most memory of the rank.
        """
        best = self.plan(0)
        if best.peak <= memory_limit:
            return best
        best = self.most(self.num_activations)
        best = replace(best, wanted=best.chosen)
        # The peak falls with the number as far as there is time for copies, so halve between what
        # is too few and what is enough.
        few, many = 0, best.chosen if best.peak <= memory_limit else 0
        while many - few > 1:
            count = (few + many) // 2
            plan = self.plan(count)
            if plan.peak <= memory_limit:
                best, many = plan, count
            else:
                few = count
        return best

    @cached_property
    def _stages(self) -> list[list[KeptValues]]:
        """The activations of each stage, the longest-lived stage first."""
        of_stage: dict[int, list[KeptValues]] = {}
        for kept in self._kept:
            of_stage.setdefault(kept.stage, []).append(kept)
        return sorted(of_stage.values(), key=lambda stage: -sum(k.lifespan for k in stage))

    @cached_property
    def _modes(self) -> list[frozenset[Kind]]:
        """The sets of copies to choose from: those that any of the activations has a route for."""
        kinds = {leg.action.kind for k in self._kept for route in k.routes for leg in route}
        modes = [WHOLE]
        if Kind.RELOAD_B in kinds:
            modes.append(PARTS)
        if Kind.OFFLOAD_W in kinds:
            modes.append(QUEUE)
        return modes

    def _plan(self, chosen: list[KeptValues], allowed: frozenset[Kind]) -> RankPlan:
        ways = {kept: kept.ways(allowed) for kept in chosen}
        copies, routes = place_copies(ways, self._times, self._num_lanes, self._turns)
        actions = tuple(self._merged(copies))
        changes = memory_changes(actions, self._sizes, MEMORY_EFFECTS)
        return RankPlan(
            actions,
            tuple(copies),
            max(accumulate(changes, initial=0.0)),
            wanted=len(chosen),
            chosen=len(chosen),
            num_moved=len(routes),
            offloaded=_number_with(Kind.OFFLOAD, routes),
            queued=_number_with(Kind.OFFLOAD_W, routes),
            too_short=sum(not routes_of for routes_of in ways.values()),
        )

    def _merged(self, copies: Iterable[Copy]) -> list[Action]:
        """Return the rank's order; of copies at one time, FREE comes before what takes memory."""
        # What is copied at the place of an action comes before it.
        order = [(place, float("inf"), 0, e.action) for place, e in enumerate(self._events)]
        for copy in copies:
            kind = copy.action.kind
            place = self._times.place_of_start(copy)
            order.append((place, copy.start, _AT_ONE_TIME[kind], copy.action))
            if kind in _FREED_BY:
                free = copy.action._replace(kind=_FREED_BY[kind])
                place = self._times.place_of_end(copy)
                order.append((place, copy.end, _AT_ONE_TIME[free.kind], free))
        return [action for *_, action in sorted(order, key=lambda entry: entry[:3])]


_AT_ONE_TIME = dict.fromkeys(COPIES, 2)
_AT_ONE_TIME |= {Kind.OFFLOAD: 0, Kind.OFFLOAD_W: 0, Kind.FREE: 1, Kind.FREE_W: 1}


def _longest(stages: list[list[KeptValues]], count: int) -> Iterator[KeptValues]:
    """Yield so many activations, whole stages first and of the last one evenly spread ones.

    Those of a stage live about equally long; spread, they are fewer at any time.
    """
    for stage in stages:
        taken = min(count, len(stage))
        count -= taken
        for place, kept in enumerate(stage):
            if (place + 1) * taken // len(stage) > place * taken // len(stage):
                yield kept


def _number_with(kind: Kind, routes: Routes) -> int:
    return sum(any(leg.action.kind is kind for leg in route) for route in routes.values())


def postponed(schedule: Schedule, timeline: Timeline, costs: Costs) -> list[list[Event]]:
    """Return when each rank computes what, with the forwards before its first B at their latest.

    Args:
        schedule: Compute actions, with copies or without.
        timeline: What ``simulate`` gave for it.
        costs: What it was simulated with.
    """
    ranks: list[list[Event]] = [[] for _ in schedule]
    for event in timeline.events:
        if event.lane == COMPUTE_LANE and event.action.kind in COMPUTE:
            ranks[event.rank].append(event)
    starts = {event.action: event.start for events in ranks for event in events}
    hops = costs.hops(schedule.placement)
    warm_up = [event for events in ranks for event in _warm_up(events)]
    after = {
        event.action: following.action
        for events in ranks
        for event, following in zip(events, events[1:], strict=False)
    }
    # The last ones first: what needs a forward has moved by then.
    for event in sorted(warm_up, key=lambda event: event.start, reverse=True):
        needed = _needed(event.action, starts, hops)
        limit = min(needed, starts.get(after.get(event.action, event.action), needed))
        starts[event.action] = max(event.start, limit - (event.end - event.start))
    move = _mover(starts)
    return [[move(event) for event in events] for events in ranks]


def _warm_up(events: list[Event]) -> list[Event]:
    first = next((n for n, e in enumerate(events) if e.action.kind is not Kind.F), len(events))
    return events[:first]


def _needed(action: Action, starts: dict[Action, float], hops: tuple[float, ...]) -> float:
    """Return when a forward is needed by the next stage, or by the backward of the last."""
    _, stage, microbatch = action
    if stage + 1 < len(hops):
        return starts[Action(Kind.F, stage + 1, microbatch)] - hops[stage]
    backwards = (Action(kind, stage, microbatch) for kind in (Kind.B, Kind.BW))
    return min(starts[backward] for backward in backwards if backward in starts)


def _mover(starts: dict[Action, float]) -> Callable[[Event], Event]:
    def move(event: Event) -> Event:
        start = starts[event.action]
        return event._replace(start=start, end=start + event.end - event.start)

    return move

"""Chooses the activations of one rank to offload, their routes, and the times of copies.

Between F and B all of an activation can be away. What W alone needs can stay away until W, and
between B and W what waits for W can go (again). Each way is a route of a few copies, each with the
time that there is for it. As in the paper (Wan et al., "PipeOffload", ICML 2025): copies back take
the latest slot that is early enough, from the last to the first; then copies to the host take the
earliest that is free.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from ..actions import (
    ACTIVATION,
    COMPUTE,
    COPIES,
    KINDS,
    MEMORY_EFFECTS,
    RELOADS,
    WAITING,
    Action,
    Kind,
    MemoryPart,
)
from ..costs import Costs
from ..schedule import Schedule
from ..simulation.memory import UnitSizes, memory_changes
from ..timeline import TOLERANCE, Event, Interval, Timeline, earliest_free_start, merge_intervals


@dataclass(frozen=True, eq=False)
class _CopyWindow:
    """One copy of a route: the action that starts it, and its time window."""

    action: Action
    seconds: float
    ready: float
    due: float

    @property
    def is_reload(self) -> bool:
        return self.action.kind in RELOADS


_Route = tuple[_CopyWindow, ...]


@dataclass(frozen=True, eq=False)
class _KeptActivation:
    """The activation of a stage and microbatch.

    Attributes:
        stage: The stage.
        lifespan: Seconds from the end of F to the start of W, or of BW.
        routes: Those whose copies would fit if the lanes were not shared, largest saving first.
    """

    stage: int
    lifespan: float
    routes: tuple[_Route, ...]


def _kept_activations(
    events: list[Event], costs: Costs, sizes: UnitSizes
) -> Iterator[_KeptActivation]:
    """Yield the activations of a rank, in the order of their B or BW."""
    num_stages = len(sizes.of) // sizes.num_slices
    there = costs.per_stage("offload", num_stages)
    back = costs.per_stage("reload", num_stages)
    whole = costs.per_stage("activation", num_stages)
    when = {event.action: event for event in events}
    for action, event in when.items():
        if action.kind in (Kind.B, Kind.BW):
            stage = action.stage
            saved = when[action._replace(kind=Kind.F)].end
            last = when.get(action._replace(kind=Kind.W), event).start
            of_unit = sizes.at(stage, action.microbatch)
            # Seconds are those of a whole activation, of which a slice is a share.
            share = 1.0 if sizes.num_slices == 1 else _share(of_unit[ACTIVATION], whole[stage])
            seconds = there[stage] * share, back[stage] * share
            routes = _routes(event, saved, last, of_unit, *seconds)
            yield _KeptActivation(
                stage, last - saved, tuple(route for route in routes if _fits(route))
            )


def _share(size: float, whole: float) -> float:
    return size / whole if whole else 1.0


def _routes(
    backward: Event, saved: float, weight: float, sizes: list[float], there: float, back: float
) -> Iterator[_Route]:
    """Yield every route of a stage and microbatch, the largest saving first.

    Args:
        backward: Its B or BW.
        saved: When F has ended.
        weight: When W starts.
        sizes: Memory of its sets of parts.
        there: Seconds of the copy of the activation to the host.
        back: The same for the copy back.
    """
    activation = sizes[ACTIVATION]

    def leg(kind: Kind, parts: MemoryPart, ready: float, due: float) -> _CopyWindow:
        share = _share(sizes[parts], activation)
        seconds = back if kind in RELOADS else there
        return _CopyWindow(backward.action._replace(kind=kind), seconds * share, ready, due)

    between = backward.end, weight
    away = leg(Kind.OFFLOAD, ACTIVATION, saved, backward.start)
    whole = leg(Kind.RELOAD, ACTIVATION, saved, backward.start)
    if backward.action.kind is Kind.BW:
        yield away, whole
        return
    for_b = leg(Kind.RELOAD_B, MemoryPart.FOR_B, saved, backward.start)
    queue = leg(Kind.RELOAD_W, WAITING, *between)
    yield away, for_b, leg(Kind.OFFLOAD_W, MemoryPart.GRADIENT, *between), queue
    if sizes[MemoryPart.FOR_W]:
        yield away, for_b, leg(Kind.RELOAD_W, MemoryPart.FOR_W, *between)
    yield away, whole
    yield leg(Kind.OFFLOAD_W, WAITING, *between), queue


def _fits(route: _Route) -> bool:
    """Whether the copies that share the time between two actions fit into it."""
    windows: defaultdict[Interval, float] = defaultdict(float)
    for leg in route:
        windows[leg.ready, leg.due] += leg.seconds
    return all(seconds <= due - ready + TOLERANCE for (ready, due), seconds in windows.items())


class _Copy(NamedTuple):
    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class RankPlan:
    """A rank's actions with copies among them.

    Attributes:
        actions: All of its actions in order.
        copy_seconds: Seconds of all copies together.
        peak: Its largest memory.
        wanted: How many activations were to be offloaded.
        chosen: How many of them were tried.
        num_moved: How many are on the host for a while.
        offloaded: How many are between F and B.
        queued: How many of them have what waits for W offloaded, between B and W.
        too_short: How many stay because there is no time for a copy there and back.
    """

    actions: tuple[Action, ...]
    copy_seconds: float
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
        return float(f"{self.peak:.9g}"), self.copy_seconds


_NUM_FRACTIONS = 16  # Fractions of a number of activations that are tried for the best.

_WHOLE = frozenset({Kind.OFFLOAD, Kind.RELOAD})
_PARTS = _WHOLE | {Kind.RELOAD_B, Kind.RELOAD_W}

_FREED_BY = {copy: kind for kind in COPIES for copy in KINDS[kind].follows if not KINDS[kind].lane}
"""For each copy to the host, the kind that frees its original on the device."""


class RankOffload:
    """A rank's actions in time, to which copies can be added.

    Args:
        events: The rank's compute actions in time.
        costs: The costs of the stages.
        sizes: The memory of their units.
    """

    def __init__(self, events: list[Event], costs: Costs, sizes: UnitSizes) -> None:
        self._events = events
        self._num_lanes = costs.copy_lanes
        self._starts = [event.start for event in events]
        self._ends = [event.end for event in events]
        self._sizes = sizes
        self._kept = list(_kept_activations(events, costs, sizes))

    @property
    def num_activations(self) -> int:
        """How many activations the rank keeps in a step."""
        return len(self._kept)

    def plan(self, count: int) -> RankPlan:
        """Offload ``count`` activations, those of the longest-lived stages first.

        They take the routes that leave the smallest peak.
        """
        chosen = list(_longest(self._activations_by_stage, count))
        plans = (self._plan(chosen, allowed) for allowed in self._modes)
        return min(plans, key=lambda plan: plan.rating)

    def plan_at_most(self, count: int) -> RankPlan:
        """Offload ``count`` activations, or fewer if that leaves a smaller peak.

        Too many copies delay each other.
        """
        best = self.plan(count)
        if best.num_moved + best.too_short < count:
            fewer = (self.plan(count * n // _NUM_FRACTIONS) for n in range(_NUM_FRACTIONS))
            best = min((best, *fewer), key=lambda plan: plan.rating)
        return replace(best, wanted=count)

    def plan_within_limit(self, memory_limit: float) -> RankPlan:
        """Offload as few activations as a limit asks for; if none will do, the most that helps."""
        best = self.plan(0)
        if best.peak <= memory_limit:
            return best
        best = self.plan_at_most(self.num_activations)
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
    def _activations_by_stage(self) -> list[list[_KeptActivation]]:
        """The activations of each stage, the longest-lived stage first."""
        of_stage: defaultdict[int, list[_KeptActivation]] = defaultdict(list)
        for kept in self._kept:
            of_stage[kept.stage].append(kept)
        return sorted(of_stage.values(), key=lambda stage: -sum(k.lifespan for k in stage))

    @cached_property
    def _modes(self) -> list[frozenset[Kind]]:
        """The sets of copies to choose from: those that any of the activations has a route for."""
        kinds = {leg.action.kind for k in self._kept for route in k.routes for leg in route}
        modes = {Kind.RELOAD_B: _PARTS, Kind.OFFLOAD_W: _PARTS | {Kind.OFFLOAD_W}}
        return [_WHOLE, *(mode for kind, mode in modes.items() if kind in kinds)]

    def _plan(self, chosen: list[_KeptActivation], allowed: frozenset[Kind]) -> RankPlan:
        ways = {
            kept: [r for r in kept.routes if all(leg.action.kind in allowed for leg in r)]
            for kept in chosen
        }
        too_short = sum(not routes for routes in ways.values())
        copies, routes = self._choose_fitting_routes(ways)
        actions = tuple(self._merged(copies))
        changes = memory_changes(actions, self._sizes, MEMORY_EFFECTS)
        kinds = [{leg.action.kind for leg in route} for route in routes]
        return RankPlan(
            actions,
            sum(copy.end - copy.start for copy in copies),
            max(accumulate(changes, initial=0.0)),
            wanted=len(chosen),
            chosen=len(chosen),
            num_moved=len(routes),
            offloaded=sum(Kind.OFFLOAD in of_route for of_route in kinds),
            queued=sum(Kind.OFFLOAD_W in of_route for of_route in kinds),
            too_short=too_short,
        )

    def _choose_fitting_routes(
        self, ways: Mapping[_KeptActivation, list[_Route]]
    ) -> tuple[list[_Copy], list[_Route]]:
        """Return the copies by their start, and their routes, of each way the first that fits.

        Where there is no time for all of them, those with the shortest lifespans take the next of
        their routes, or stay on the device after the last.
        """
        left = {kept: routes for kept, routes in ways.items() if routes}
        while left:
            chosen = {kept: routes[0] for kept, routes in left.items()}
            copies = self._assign_copy_times(chosen.values())
            late = [kept for kept, route in chosen.items() if not self._is_in_time(route, copies)]
            if not late:
                return sorted(copies.values()), list(chosen.values())
            # A few at a time: each that yields makes room in which others are in time.
            for kept in sorted(late, key=lambda kept: kept.lifespan)[: max(1, len(late) // 4)]:
                left[kept] = left[kept][1:]
            left = {kept: routes for kept, routes in left.items() if routes}
        return [], []

    def _assign_copy_times(self, routes: Iterable[_Route]) -> dict[_CopyWindow, _Copy]:
        pairs = [pair for route in routes for pair in zip(route, (*route[1:], None), strict=True)]
        copies: dict[_CopyWindow, _Copy] = {}
        limit = float("inf")
        # From the last one on, each as late as possible: it takes device memory from its start.
        back = [leg for leg, _ in pairs if leg.is_reload]
        for leg in sorted(back, key=lambda leg: leg.due, reverse=True):
            limit = min(limit, leg.due) - leg.seconds
            copies[leg] = _Copy(limit, limit + leg.seconds, leg.action)
        occupied = (
            merge_intervals([copy[:2] for copy in copies.values()]) if self._num_lanes == 1 else []
        )
        free = 0.0
        # Each as early as possible: its device memory is free at its end.
        there = [(leg, after) for leg, after in pairs if not leg.is_reload]
        for leg, after in sorted(there, key=lambda pair: pair[0].ready):
            start = earliest_free_start(max(free, leg.ready), leg.seconds, occupied)
            copies[leg] = _Copy(start, start + leg.seconds, leg.action)
            if after is None or start + leg.seconds <= copies[after].start + TOLERANCE:
                free = start + leg.seconds  # Others do not wait for what is late.
        return copies

    def _is_in_time(self, route: _Route, copies: Mapping[_CopyWindow, _Copy]) -> bool:
        """Whether each copy runs in its time, and each stay on the host lasts for an action."""
        for leg, following in zip(route, route[1:], strict=False):
            copy, after = copies[leg], copies[following]
            if after.start < following.ready - TOLERANCE:
                return False
            if not leg.is_reload and self._place_of_end(copy) >= self._place_of_start(after):
                return False
        return True

    def _place_of_start(self, copy: _Copy) -> int:
        """Return before which action a copy is started: the one that runs then, or the next."""
        return bisect_right(self._ends, copy.start + TOLERANCE)

    def _place_of_end(self, copy: _Copy) -> int:
        """Return before which action the copied memory is free on the device."""
        return bisect_left(self._starts, copy.end - TOLERANCE)

    def _merged(self, copies: Iterable[_Copy]) -> list[Action]:
        """Return the rank's order; of copies at one time, FREE comes before what takes memory."""
        # What is copied at the place of an action comes before it.
        order = [(place, float("inf"), 0, e.action) for place, e in enumerate(self._events)]
        for copy in copies:
            freed_by = _FREED_BY.get(copy.action.kind)
            place = self._place_of_start(copy)
            order.append((place, copy.start, 0 if freed_by else 2, copy.action))
            if freed_by:
                free = copy.action._replace(kind=freed_by)
                order.append((self._place_of_end(copy), copy.end, 1, free))
        return [action for *_, action in sorted(order, key=lambda entry: entry[:3])]


def _longest(stages: list[list[_KeptActivation]], count: int) -> Iterator[_KeptActivation]:
    """Yield ``count`` activations: whole stages first, evenly spread ones of the last stage.

    Those of a stage live about equally long; spread, they are fewer at any time.
    """
    for stage in stages:
        num_chosen = min(count, len(stage))
        count -= num_chosen
        for place, kept in enumerate(stage):
            if (place + 1) * num_chosen // len(stage) > place * num_chosen // len(stage):
                yield kept


def delay_warm_up_events(schedule: Schedule, timeline: Timeline, costs: Costs) -> list[list[Event]]:
    """Return when each rank computes what, with the forwards before its first B at their latest.

    Args:
        schedule: Compute actions, without copies.
        timeline: Its timeline.
        costs: The costs of that timeline.
    """
    ranks: list[list[Event]] = [[] for _ in schedule]
    for event in timeline.events:
        if event.action.kind in COMPUTE:
            ranks[event.rank].append(event)
    starts = {event.action: event.start for events in ranks for event in events}
    latencies = costs.latencies(schedule.placement)
    last_stage = len(latencies) - 1
    warm_up: list[tuple[Event, Event | None]] = []
    for events in ranks:
        for event, after in zip(events, [*events[1:], None], strict=True):
            if event.action.kind is not Kind.F:
                break
            warm_up.append((event, after))
    # The last ones first: the actions that need a forward have moved by then.
    for event, after in sorted(warm_up, key=lambda pair: pair[0].start, reverse=True):
        _, stage, microbatch = event.action
        if stage < last_stage:
            limit = starts[Action(Kind.F, stage + 1, microbatch)] - latencies[stage]
        else:
            backwards = (Action(kind, stage, microbatch) for kind in (Kind.B, Kind.BW))
            limit = min(starts[backward] for backward in backwards if backward in starts)
        if after is not None:
            limit = min(limit, starts[after.action])
        starts[event.action] = max(event.start, limit - (event.end - event.start))
    return [[_moved(event, starts[event.action]) for event in events] for events in ranks]


def _moved(event: Event, start: float) -> Event:
    return event._replace(start=start, end=start + event.end - event.start)

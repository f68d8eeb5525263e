"""When the forwards of the warm-up could run at the latest, so that they hold memory for less long.

As in Wan et al., "PipeOffload", ICML 2025: no backward moves. Only times change, and the
order of a rank stays; it is by the times that copies are placed, and a FREE that waits for its copy
then holds back the forward after it.
"""

from __future__ import annotations

from collections.abc import Callable

from ..actions import COMPUTE, Action, Kind
from ..costs import Costs
from ..schedule import Schedule
from ..timeline import COMPUTE_LANE, Event, Timeline

__all__ = ["postponed"]


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

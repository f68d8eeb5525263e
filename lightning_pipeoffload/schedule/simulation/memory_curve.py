"""How the memory of each rank, or what it has on the host, goes up and down over a timeline."""

from __future__ import annotations

from collections.abc import Mapping

from ..actions import HOST_EFFECTS, MEMORY_EFFECTS, Kind, MemoryEffect
from ..costs import Costs
from ..timeline import COMPUTE_LANE, Event, Timeline
from .memory import memory_changes, part_sizes

__all__ = ["Curve", "host_memory_curves", "memory_curves"]

Curve = list[tuple[float, float]]
"""Times and the memory from then on."""


def memory_curves(timeline: Timeline, costs: Costs) -> list[Curve]:
    """Return for each rank the times at which its memory changes, and the memory from then on.

    What an action adds in all counts at its start, what it takes away at its end.

    Args:
        timeline: What ``simulate`` gave for these costs.
        costs: Memory of an activation and of a weight residue.
    """
    return _curves(timeline, costs, MEMORY_EFFECTS)


def host_memory_curves(timeline: Timeline, costs: Costs) -> list[Curve]:
    """Return the same for what each rank has on the host, from the start of the copy there on."""
    return _curves(timeline, costs, HOST_EFFECTS)


def _curves(timeline: Timeline, costs: Costs, effects: Mapping[Kind, MemoryEffect]) -> list[Curve]:
    num_stages = 1 + max((event.action.stage for event in timeline.events), default=-1)
    sizes = part_sizes(costs, num_stages)
    ranks: list[list[Event]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        if event.lane == COMPUTE_LANE or event.action.kind in (Kind.OFFLOAD, Kind.OFFLOAD_W):
            ranks[event.rank].append(event)
    return [_summed(_changes_of_rank(events, sizes, effects)) for events in ranks]


def _changes_of_rank(
    events: list[Event], sizes: list[list[float]], effects: Mapping[Kind, MemoryEffect]
) -> Curve:
    changes = memory_changes((event.action for event in events), sizes, effects)
    found = [
        (event.start if change > 0 else event.end, change)
        for event, change in zip(events, changes, strict=True)
        if event.action.kind in effects
    ]
    # A copy may start after what its rank does next.
    return sorted(found, key=lambda change: change[0])


def _summed(changes: Curve) -> Curve:
    """Add up the changes; of those at one time only the sum and what is highest are kept."""
    curve = [(0.0, 0.0)]
    for time, change in changes:
        memory = curve[-1][1] + change
        if time == curve[-1][0] and change >= 0:
            curve.pop()
        curve.append((time, memory))
    return curve

"""How the memory of each rank goes up and down over a timeline."""

from __future__ import annotations

from .actions import MEMORY_EFFECTS
from .costs import Costs
from .memory import memory_changes, part_sizes
from .timeline import COMPUTE_LANE, Event, Timeline

__all__ = ["Curve", "memory_curves"]

Curve = list[tuple[float, float]]
"""Times and the memory from then on."""


def memory_curves(timeline: Timeline, costs: Costs) -> list[Curve]:
    """Return for each rank the times at which its memory changes, and the memory from then on.

    What an action adds in all counts at its start, what it takes away at its end.

    Args:
        timeline: What ``simulate`` gave for these costs.
        costs: Memory of an activation and of a weight residue.
    """
    return [_summed(changes) for changes in _changes(timeline, costs)]


def _changes(timeline: Timeline, costs: Costs) -> list[Curve]:
    num_stages = 1 + max((event.action.stage for event in timeline.events), default=-1)
    sizes = part_sizes(costs, num_stages)
    ranks: list[list[Event]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        if event.lane == COMPUTE_LANE:
            ranks[event.rank].append(event)
    return [_changes_of_rank(events, sizes) for events in ranks]


def _changes_of_rank(events: list[Event], sizes: list[list[float]]) -> Curve:
    changes = memory_changes((event.action for event in events), sizes, MEMORY_EFFECTS)
    return [
        (event.start if change > 0 else event.end, change)
        for event, change in zip(events, changes, strict=True)
        if event.action.kind in MEMORY_EFFECTS
    ]


def _summed(changes: Curve) -> Curve:
    """Add up the changes; of those at one time only the sum and what is highest are kept."""
    curve = [(0.0, 0.0)]
    for time, change in changes:
        memory = curve[-1][1] + change
        if time == curve[-1][0] and change >= 0:
            curve.pop()
        curve.append((time, memory))
    return curve

"""How the memory of each rank goes up and down over a timeline."""

from __future__ import annotations

from collections import defaultdict

from .actions import MEMORY_EFFECTS
from .costs import Costs
from .timeline import Timeline

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
    changes = _changes(timeline, costs)
    return [_summed(changes[rank]) for rank in range(timeline.num_ranks)]


def _changes(timeline: Timeline, costs: Costs) -> defaultdict[int, list[tuple[float, float]]]:
    num_stages = 1 + max((event.action.stage for event in timeline.events), default=-1)
    activation = costs.per_stage("activation", num_stages)
    residue = costs.per_stage("weight_residue", num_stages)
    changes: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in timeline.events:
        if effect := MEMORY_EFFECTS.get(event.action.kind):
            stage = event.action.stage
            change = effect.activations * activation[stage] + effect.residues * residue[stage]
            changes[event.rank].append((event.start if change > 0 else event.end, change))
    return changes


def _summed(changes: list[tuple[float, float]]) -> Curve:
    """Add up the changes; at one time, what goes makes room for what comes."""
    curve = [(0.0, 0.0)]
    for time, change in sorted(changes):
        memory = curve[-1][1] + change
        if time == curve[-1][0]:
            curve.pop()
        curve.append((time, memory))
    return curve

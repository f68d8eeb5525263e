"""When every action of a schedule runs, and how much memory each rank needs.

A replay in the order of what waits for what, with a clock per rank: time linear in the actions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from .actions import MEMORY_EFFECTS, Action, Kind
from .costs import Costs
from .dependencies import outcome, replay
from .schedule import Schedule
from .timeline import COMPUTE_LANE, Event, Timeline

__all__ = ["simulate"]


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Time a schedule of compute actions, or a lowered plan.

    Where transfers are not spelled out, every hop between two ranks is implied: it starts when F, B
    or BW ends. A RECV waits until its message is there, and is no work.

    Args:
        schedule: What to time.
        costs: Seconds and memory of its stages.

    Raises:
        ScheduleError: The ranks wait for each other, or a cost does not fit the number of stages.
    """
    seconds = _durations(schedule, costs)
    hop_seconds = _hops(schedule, costs)
    clocks = [0.0] * schedule.num_ranks
    ended: dict[Action, float] = {}
    events = []
    for rank, action, awaited in replay(schedule):
        start = clocks[rank]
        if awaited is not None:
            start = max(start, ended[awaited] + hop_seconds(awaited, rank))
        end = start
        if action.kind in seconds:
            end += seconds[action.kind][action.stage]
            events.append(Event(rank, COMPUTE_LANE, action, start, end))
        clocks[rank] = ended[outcome(action)] = end
    return Timeline(tuple(events), peak_memory(schedule, costs))


def peak_memory(schedule: Schedule, costs: Costs) -> tuple[float, ...]:
    """Return the largest sum of live activations and residues on each rank.

    What an action adds in all counts at its start, what it takes away at its end. Only the order of
    a rank's actions matters, not when they run.
    """
    activation = costs.per_stage("activation", schedule.num_stages)
    residue = costs.per_stage("weight_residue", schedule.num_stages)
    change: defaultdict[Kind, list[float]] = defaultdict(lambda: [0.0] * schedule.num_stages)
    for kind, effect in MEMORY_EFFECTS.items():
        change[kind] = [
            effect.activations * a + effect.residues * r
            for a, r in zip(activation, residue, strict=True)
        ]

    def peak(rank: tuple[Action, ...]) -> float:
        live = highest = 0.0
        for action in rank:
            live += change[action.kind][action.stage]
            highest = max(highest, live)
        return highest

    return tuple(peak(rank) for rank in schedule)


def _durations(schedule: Schedule, costs: Costs) -> dict[Kind, list[float]]:
    names = ("forward", "backward_input", "backward_weight")
    f, b, w = (list(costs.per_stage(name, schedule.num_stages)) for name in names)
    return {Kind.F: f, Kind.B: b, Kind.W: w, Kind.BW: [x + y for x, y in zip(b, w, strict=True)]}


def _hops(schedule: Schedule, costs: Costs) -> Callable[[Action, int], float]:
    """Return the seconds from the end of an action on any rank until a rank has its outcome."""
    after_stage = costs.per_stage("communication", schedule.num_stages)

    def hop(awaited: Action, rank: int) -> float:
        if schedule.rank_of(awaited.stage) == rank:
            return 0.0
        downstream = awaited.kind in (Kind.F, Kind.SEND_F)
        return after_stage[awaited.stage if downstream else awaited.stage - 1]

    return hop

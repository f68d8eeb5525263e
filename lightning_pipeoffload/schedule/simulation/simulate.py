"""When every action of a schedule runs, and how long it takes from one step to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import isclose

from ..actions import COMPUTE, HOST_EFFECTS, MEMORY_EFFECTS, RELOADS, Action, Kind
from ..costs import Costs
from ..dependencies import outcome, replay
from ..schedule import Schedule
from ..timeline import COMPUTE_LANE, REDUCE_LANE, TOLERANCE, Event, Timeline
from .lanes import SimulatedCopies, SimulatedReductions
from .memory import memory_changes, part_sizes, peak_host_memory, peak_memory

__all__ = [
    "StepSimulation",
    "period_bubble",
    "simulate",
    "simulate_steps",
    "steady_period",
    "timeline_of",
]


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Time a schedule of compute actions, with copies or without, or a lowered plan.

    Where transfers are not spelled out, every hop between two ranks is implied: it starts when F, B
    or BW ends. A RECV waits until its message is there, and is no work. Copies run on lanes of
    their own, in the order in which a rank starts them; FREE waits for its copy, and B, W or BW for
    the copy back of what they need. REDUCE has a lane of its own, too, and nothing waits for it; a
    share of it runs behind each W of its tail.

    Args:
        schedule: What to time.
        costs: Seconds and memory of its stages.

    Raises:
        ScheduleError: The ranks wait for each other, or a cost does not fit the number of stages.
    """
    events = StepSimulation(schedule, costs).run([0.0] * schedule.num_ranks)
    return timeline_of(events, schedule, costs)


def timeline_of(events: Iterable[Event], schedule: Schedule, costs: Costs) -> Timeline:
    """Return the timeline of a schedule that was timed."""
    peaks = peak_memory(schedule, costs), peak_host_memory(schedule, costs)
    return Timeline(tuple(events), *peaks)


class StepSimulation:
    """Times a schedule, for ranks that begin when they are told to.

    Args:
        schedule: What to time.
        costs: Seconds and memory of its stages.
        copies: Seconds of every copy, and of W's part of every RELOAD, where they are not those
            that follow from the costs.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        copies: tuple[dict[Action, float], dict[Action, float]] | None = None,
    ) -> None:
        self._schedule, self._costs = schedule, costs
        self._seconds = _durations(schedule, costs)
        self._hop_seconds = _hops(schedule, costs)
        self._copies = copies or _copy_durations(schedule, costs)
        self._steps = list(replay(schedule))

    def run(self, starts: Sequence[float]) -> list[Event]:
        """Return the events of a step.

        Args:
            starts: When each rank begins.
        """
        costs, num_ranks = self._costs, self._schedule.num_ranks
        lanes = SimulatedCopies(num_ranks, costs, *self._copies)
        reductions = SimulatedReductions(self._schedule, costs)
        clocks = [*starts]
        ended: dict[Action, float] = {}
        events: list[Event] = []
        for rank, action, awaited in self._steps:
            # In the replay's order what an action waits for has always ended.
            start = clocks[rank]
            if awaited is not None:
                start = max(start, ended[awaited] + self._hop_seconds(awaited, rank))
            if lanes.in_use:
                start = lanes.wait(action, start)
                events += lanes.start(rank, action, start)
            end = start
            if action.kind in COMPUTE:
                end += self._seconds[action.kind][action.stage]
                events.append(Event(rank, COMPUTE_LANE, action, start, end))
            elif action.kind is Kind.REDUCE:
                events.append(reductions.run(rank, action, start, ended))
            clocks[rank] = ended[outcome(action)] = end
        return events


def _copy_durations(
    schedule: Schedule, costs: Costs
) -> tuple[dict[Action, float], dict[Action, float]]:
    """Return the seconds of every copy, and those of W's part of each RELOAD that has one.

    A copy takes its stage's, times the share of the activation that it moves.
    """
    durations: dict[Action, float] = {}
    for_w: dict[Action, float] = {}
    if not schedule.has_copies:
        return durations, for_w
    names = ("activation", "weight_input", "offload", "reload")
    stages = (costs.per_stage(name, schedule.num_stages) for name in names)
    activation, weight_input, offload, reload = stages
    whole = dict.fromkeys((Kind.OFFLOAD, Kind.OFFLOAD_W), offload) | dict.fromkeys(RELOADS, reload)
    sizes = part_sizes(costs, schedule.num_stages)
    for rank in schedule:
        device = memory_changes(rank, sizes, MEMORY_EFFECTS)
        host = memory_changes(rank, sizes, HOST_EFFECTS)
        for action, *moved in zip(rank, device, host, strict=True):
            kind, stage, _ = action
            if kind in whole:
                # What is moved is what comes to be on the other side: one of the two changes is 0.
                share = max(moved) / activation[stage] if activation[stage] else 1.0
                durations[action] = whole[kind][stage] * share
                if kind is Kind.RELOAD and weight_input[stage]:
                    for_w[action] = durations[action] * weight_input[stage] / activation[stage]
    return durations, for_w


def _durations(schedule: Schedule, costs: Costs) -> dict[Kind, tuple[float, ...]]:
    seconds = costs.compute(schedule.num_stages)
    fused = tuple(b + w for b, w in zip(seconds[Kind.B], seconds[Kind.W], strict=True))
    return {**seconds, Kind.BW: fused}


def _hops(schedule: Schedule, costs: Costs) -> Callable[[Action, int], float]:
    """Return the seconds from the end of an action on any rank until a rank has its outcome."""
    after_stage = costs.per_stage("communication", schedule.num_stages)

    def hop(awaited: Action, rank: int) -> float:
        if schedule.rank_of(awaited.stage) == rank:
            return 0.0
        downstream = awaited.kind in (Kind.F, Kind.SEND_F)
        return after_stage[awaited.stage if downstream else awaited.stage - 1]

    return hop


# Ranks have settled after about as many steps as it takes the last to be held up by the first.
_MOST_STEPS = 16


def steady_period(schedule: Schedule, costs: Costs, has_barrier: bool) -> float:
    """Return the seconds from one step to the next, once the ranks have settled.

    Args:
        schedule: The schedule, lowered or not.
        costs: Seconds of its stages.
        has_barrier: Whether no rank begins a step before all have ended the one before.

    Raises:
        ScheduleError: The ranks wait for each other, or a cost does not fit the number of stages.
    """
    ends = [[0.0] * schedule.num_ranks]
    for _, ended in islice(_steps(schedule, costs, has_barrier), _MOST_STEPS):
        ends.append(ended)
        gained = [end - start for start, end in zip(*ends[-2:], strict=True)]
        if isclose(min(gained), max(gained), rel_tol=TOLERANCE):
            return max(gained)
    # They take turns at being late: what counts is the mean.
    middle = ends[_MOST_STEPS // 2]
    return max(b - a for a, b in zip(middle, ends[-1], strict=True)) / (_MOST_STEPS // 2)


def period_bubble(timeline: Timeline, period: float) -> float:
    """Return the idle share of the ranks' time in a step's period.

    Args:
        timeline: One step.
        period: The seconds from one step to the next.
    """
    available = timeline.num_ranks * period
    return 1 - sum(timeline.busy) / available if available else 0.0


def simulate_steps(schedule: Schedule, costs: Costs, num_steps: int, has_barrier: bool) -> Timeline:
    """Time several steps, one after the other; each counts its microbatches on from the last.

    Args:
        schedule: The schedule of one step, lowered or not.
        costs: Seconds and memory of its stages.
        num_steps: How many steps.
        has_barrier: Whether no rank begins a step before all have ended the one before.

    Raises:
        ScheduleError: The ranks wait for each other, or a cost does not fit the number of stages.
    """
    steps = islice(_steps(schedule, costs, has_barrier), num_steps)
    numbered = (
        event._replace(action=_later(event.action, step * schedule.num_microbatches))
        for step, (events, _) in enumerate(steps)
        for event in events
    )
    return timeline_of(numbered, schedule, costs)


def _later(action: Action, num_microbatches: int) -> Action:
    return action._replace(microbatch=action.microbatch + num_microbatches)


def _steps(
    schedule: Schedule, costs: Costs, has_barrier: bool
) -> Iterator[tuple[list[Event], list[float]]]:
    """Yield each step's events, and when each rank begins the next one."""
    simulation = StepSimulation(schedule, costs)
    ends = [0.0] * schedule.num_ranks
    while True:
        events = simulation.run(ends)
        for event in events:
            if event.lane in (COMPUTE_LANE, REDUCE_LANE):
                ends[event.rank] = max(ends[event.rank], event.end)
        if has_barrier:
            ends = [max(ends)] * len(ends)
        yield events, [*ends]

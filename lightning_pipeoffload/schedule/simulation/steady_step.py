"""Steps back to back: how long it takes from one to the next, and what that looks like.

With a barrier every rank begins when the last one has ended, so that the period is the makespan.
Without one a rank begins the next step when its own is done, and steps fit into each other::

    with a barrier                        without
    rank 0  F F F B B W . . |F F F B      rank 0  F F F B B W W F F F B B W W
    rank 1  . F F B F B W W |. F F B      rank 1  . F F B F B W W F F B F B W W

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import isclose

from ..actions import Action
from ..costs import Costs
from ..schedule import Schedule
from ..timeline import COMPUTE_LANE, REDUCE_LANE, TOLERANCE, Event, Timeline
from .simulate import StepSimulation, timeline_of

__all__ = ["period_bubble", "simulate_steps", "steady_period"]

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

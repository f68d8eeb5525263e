"""When every action of a schedule runs, and how long it takes from one step to the next.

Copies and reductions run on lanes of their own. What B needs is copied back first, and B waits for
no more::

    h2d      RELOAD  [ for B | for W ]
    compute                  [== B ==][== W ==]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import isclose
from typing import NamedTuple

from ..actions import (
    COMPUTE,
    COMPUTE_LANE,
    COPY_LANES,
    HOST_EFFECTS,
    KINDS,
    MEMORY_EFFECTS,
    Action,
    Kind,
    MemoryPart,
)
from ..costs import Costs
from ..passes.last_weights import tails
from ..replay import operations_of, replay
from ..schedule import Schedule
from ..timeline import TOLERANCE, Event, Interval, Timeline
from .memory import memory_changes, part_sizes, peak_host_memory, peak_memory


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Time a schedule of compute actions, with copies or without, or a lowered plan.

    Without transfers in the schedule, each message between two ranks is implied: it is sent when F,
    B or BW ends. A RECV waits until its message is there, which is idle time. Copies run on lanes
    of their own, in the order in which a rank starts them; FREE waits for its copy, and B, W or BW
    for the copy back of what they need. REDUCE and STEP have lanes of their own, too, and nothing
    of the same step waits for them. They overlap with their tail, the last W's before them: they
    start when the first share of its time is over, and end at least one share of theirs after it.

    Args:
        schedule: The schedule.
        costs: Seconds and memory of its stages.

    Raises:
        ScheduleError: The ranks wait for each other, or a cost does not fit the number of stages.
    """
    events, _ = Simulation(schedule, costs).run([0.0] * schedule.num_ranks)
    return _timeline(events, schedule, costs)


def _timeline(events: Iterable[Event], schedule: Schedule, costs: Costs) -> Timeline:
    peaks = peak_memory(schedule, costs), peak_host_memory(schedule, costs)
    return Timeline(tuple(events), *peaks, schedule.num_sequence_slices)


class _LaneUse(NamedTuple):
    """The waits and the lane of an action that involves other lanes than compute.

    Attributes:
        waits: The places in the replay of the copies that it waits for, and the seconds at the end
            of each that it does not wait for.
        lane: The lane that it occupies; None: it only waits.
        seconds: How long.
        tail: Of a REDUCE or STEP, the places of its tail's first and last W.
    """

    waits: tuple[tuple[int, float], ...] = ()
    lane: Hashable = None
    seconds: float = 0.0
    tail: tuple[int, int] | None = None


_BACKGROUND = [kind for kind, row in KINDS.items() if row.lane not in ("", COMPUTE_LANE)]
_WAITS_FOR = {
    kind: [other for other in _BACKGROUND if KINDS[other].puts & row.needs or other in row.follows]
    for kind, row in KINDS.items()
}
"""The kinds that take time on other lanes and must have ended before an action of each kind."""


class Simulation:
    """A schedule to be timed, once or for several steps.

    Args:
        schedule: The schedule.
        costs: Seconds and memory of its stages.
        copies: Seconds of every copy, and of W's part of every RELOAD, where they are not those
            that follow from the costs.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        copies: tuple[Mapping[Action, float], Mapping[Action, float]] | None = None,
    ) -> None:
        self._schedule, self._costs, self._final = schedule, costs, schedule.final_kind
        self._replay = order = replay(schedule)
        count = schedule.num_sequence_slices
        operations = operations_of(schedule)
        seconds_of_kind = _seconds_of(costs, schedule.num_stages, count)
        delays = _delays(schedule, costs)
        seconds = [
            seconds_of_kind[kind][stage * count + part] if kind in COMPUTE else 0.0
            for kind, stage, part in operations
        ]
        waits = [delays.get(operation, 0.0) for operation in operations]
        self._seconds = [seconds[n] for n in order.operations]
        self._delays = [waits[n] for n in order.operations]
        of_rank = [iter(rank) for rank in schedule]
        self.actions = [next(of_rank[rank]) for rank in order.ranks]
        self._lane_uses: list[_LaneUse | None] | None = None
        if schedule.kinds & set(_BACKGROUND):
            whole = seconds_of_kind if count == 1 else _seconds_of(costs, schedule.num_stages)
            self._lane_uses = self._lanes(whole, copies or copy_seconds(schedule, costs))

    def _lanes(
        self,
        seconds_of_kind: Mapping[Kind, Sequence[float]],
        copies: tuple[Mapping[Action, float], Mapping[Action, float]],
    ) -> list[_LaneUse | None]:
        """Return the waits and lanes of the actions of the replay; None for those without."""
        copy_seconds, for_w = copies
        place = {action: n for n, action in enumerate(self.actions)}
        weights = {tail.final: tail.weights for rank in self._schedule for tail in tails(rank)}
        uses: list[_LaneUse | None] = []
        kinds = self._schedule.kinds
        waits_for = {kind: [k for k in others if k in kinds] for kind, others in _WAITS_FOR.items()}
        for n, (rank, action) in enumerate(zip(self._replay.ranks, self.actions, strict=True)):
            kind, stage, microbatch = action
            row = KINDS[kind]
            started = (Action(other, stage, microbatch) for other in waits_for[kind])
            waits = tuple(
                (place[copy], 0.0 if row.needs & MemoryPart.FOR_W else for_w.get(copy, 0.0))
                for copy in started
                if place.get(copy, n) < n
            )
            if kind in _BACKGROUND:
                lane = self._lane_of(rank, row.lane)
                seconds = copy_seconds.get(action, seconds_of_kind[kind][stage])
                of_tail = weights.get(action)
                tail = (place[of_tail[0]], place[of_tail[-1]]) if of_tail else None
                uses.append(_LaneUse(waits, lane, seconds, tail))
            else:
                uses.append(_LaneUse(waits) if waits else None)
        return uses

    def _lane_of(self, rank: int, lane: str) -> Hashable:
        # A device with one lane copies both ways on it, in turns.
        is_shared = lane in COPY_LANES and self._costs.copy_lanes == 1
        return rank, "" if is_shared else lane

    def run(self, starts: Sequence[float]) -> tuple[Iterator[Event], list[float]]:
        """Return the events of a step, those of a rank in its order, and when each rank ends it.

        Args:
            starts: When each rank begins.
        """
        spans: dict[int, Interval] = {}
        free: defaultdict[Hashable, float] = defaultdict(float)

        def reach(use: _LaneUse, place: int, start: float, ends: list[float]) -> float:
            for copy, not_awaited in use.waits:
                start = max(start, spans[copy][1] - not_awaited)
            if use.lane is None:
                return start
            if use.tail is not None:
                first, last = use.tail
                begins = ends[first] - self._seconds[first]
                spans[place] = _overlap_with_tail(begins, ends[last], use.seconds, free[use.lane])
            else:
                begin = max(start, free[use.lane])
                spans[place] = begin, begin + use.seconds
            free[use.lane] = spans[place][1]
            return start

        order = self._replay
        begins, ends, last = order.time(self._seconds, self._delays, starts, self._lane_uses, reach)
        if self._final is not None:
            lane = KINDS[self._final].lane
            last = [max(end, free.get((rank, lane), end)) for rank, end in enumerate(last)]
        return self._events(begins, ends, spans), last

    def _events(
        self, begins: list[float], ends: list[float], spans: dict[int, Interval]
    ) -> Iterator[Event]:
        columns = zip(self._replay.ranks, self.actions, begins, ends, strict=True)
        for place, (rank, action, begin, end) in enumerate(columns):
            kind = action.kind
            if kind in COMPUTE or kind in MEMORY_EFFECTS:
                yield Event(rank, COMPUTE_LANE, action, begin, end)
            if place in spans:
                yield Event(rank, KINDS[kind].lane, action, *spans[place])


def _overlap_with_tail(begins: float, ends: float, seconds: float, free: float) -> Interval:
    """Return when a REDUCE or STEP runs, whose tail completes one share after another."""
    length = (ends - begins) / _NUM_SHARES
    start = max(free, begins + length)
    # The lane is busy without a gap from the first share or up to the last one.
    return start, max(start + seconds, ends + seconds / _NUM_SHARES)


def _seconds_of(costs: Costs, num_stages: int, num_slices: int = 1) -> dict[Kind, list[float]]:
    """Return the seconds of each kind at every stage, or at every stage's slices in turn.

    Those of a copy are of a whole activation.
    """
    seconds = {}
    for kind, row in KINDS.items():
        columns = [costs.per_slice(name, num_stages, num_slices) for name in row.seconds]
        seconds[kind] = [sum(stage) for stage in zip(*columns, strict=True)]
    return seconds


def _delays(schedule: Schedule, costs: Costs) -> dict[tuple[Kind, int, int], float]:
    """Return the seconds of the message that each operation waits for, where it crosses ranks."""
    delays: dict[tuple[Kind, int, int], float] = {}
    num_slices = schedule.num_sequence_slices
    forward, backward = [Kind.F], [Kind.B, Kind.BW]
    if schedule.has_transfers:
        forward, backward = [Kind.RECV_F], [Kind.RECV_B]
    for stage, latency in enumerate(costs.latencies(schedule.placement)[:-1]):
        for part, seconds in enumerate(
            costs.divide_among_slices("communication", [latency], num_slices)
        ):
            delays.update({(kind, stage + 1, part): seconds for kind in forward})
            delays.update({(kind, stage, part): seconds for kind in backward})
    return delays


def copy_seconds(
    schedule: Schedule, costs: Costs
) -> tuple[dict[Action, float], dict[Action, float]]:
    """Return the seconds of every copy, and those of W's part of each RELOAD that has one.

    A copy takes its stage's seconds times the share of the activation that it moves.
    """
    durations: dict[Action, float] = {}
    for_w: dict[Action, float] = {}
    if not schedule.has_copies:
        return durations, for_w
    names = ("activation", "weight_input")
    activation, weight_input = (costs.per_stage(name, schedule.num_stages) for name in names)
    whole = _seconds_of(costs, schedule.num_stages)
    count = schedule.num_sequence_slices
    sizes = part_sizes(costs, schedule.num_stages, count)
    for rank in schedule:
        device = memory_changes(rank, sizes, MEMORY_EFFECTS)
        host = memory_changes(rank, sizes, HOST_EFFECTS)
        for action, *moved in zip(rank, device, host, strict=True):
            kind, stage, _ = action
            if KINDS[kind].lane in COPY_LANES:
                # What is moved appears on the other side: one of the two changes is 0.
                share = max(moved) / activation[stage] if activation[stage] else 1.0 / count
                durations[action] = whole[kind][stage] * share
                if kind is Kind.RELOAD and weight_input[stage]:
                    for_w[action] = durations[action] * weight_input[stage] / activation[stage]
    return durations, for_w


# Buckets of a stage's parameters: a stage of a large model has more, one of a small model fewer.
_NUM_SHARES = 8

# The period is steady after about as many steps as it takes the last to be held up by the first.
_MOST_STEPS = 16


def steady_period(schedule: Schedule, costs: Costs, has_barrier: bool) -> float:
    """Return the seconds from one step to the next, in the steady state.

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
    # They take turns at being late, so the period is the mean.
    middle = ends[_MOST_STEPS // 2]
    return max(b - a for a, b in zip(middle, ends[-1], strict=True)) / (_MOST_STEPS // 2)


def period_bubble(timeline: Timeline, period: float) -> float:
    """Return the idle share of the ranks' time in a period.

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

    def later(action: Action, step: int) -> Action:
        return action._replace(microbatch=action.microbatch + step * schedule.num_units)

    steps = islice(_steps(schedule, costs, has_barrier), num_steps)
    numbered = (
        event._replace(action=later(event.action, step))
        for step, (events, _) in enumerate(steps)
        for event in events
    )
    return _timeline(numbered, schedule, costs)


def _steps(
    schedule: Schedule, costs: Costs, has_barrier: bool
) -> Iterator[tuple[Iterator[Event], list[float]]]:
    """Yield each step's events, and when each rank begins the next one."""
    simulation = Simulation(schedule, costs)
    ends = [0.0] * schedule.num_ranks
    after = [0.0] * schedule.num_ranks
    if schedule.final_kind is not Kind.STEP:
        after = optimizer_step_seconds(schedule, costs)
    while True:
        events, ends = simulation.run(ends)
        if has_barrier:
            ends = [max(ends)] * len(ends)
        ends = [end + step for end, step in zip(ends, after, strict=True)]
        yield events, ends


def optimizer_step_seconds(schedule: Schedule, costs: Costs) -> list[float]:
    """Return the seconds of each rank's optimizer step on the host."""
    of_stages = costs.per_stage("step", schedule.num_stages)
    ranks = range(schedule.num_ranks)
    return [sum(of_stages[stage] for stage in schedule.stages_of(rank)) for rank in ranks]

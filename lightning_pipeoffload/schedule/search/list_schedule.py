"""Run the ranks of a pipeline in time and put W where they would wait or lack memory.

Zero-bubble schedules decide on the order of F and B; W follows from it. Nothing waits for W but the
memory that it frees, so it runs when the memory is needed, or when a rank would be idle. This file
is that second half; what is the first is an ``OrderRule``.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple, Protocol

from ..actions import Action, Kind
from ..schedule import Schedule
from .problem import ROUNDING, Problem

__all__ = ["Filled", "OrderRule", "Progress", "Wanted", "fill_gaps", "fill_rounds"]


class Progress:
    """How far every rank is, and what it has used up.

    Attributes:
        problem: What is scheduled.
        forward_ready: When each microbatch that has arrived can start F, for every stage.
        backward_ready: The same for B.
        num_forward: How many F every stage has started; the next one's microbatch.
        num_backward: The same for B.
        pending: B without W of every rank, as stage and microbatch, oldest first.
        free: When every rank has ended what it runs.
        memory: What every rank holds.
        idle: Seconds that every rank has waited since its first F.
        actions: What every rank has run.
    """

    def __init__(self, problem: Problem) -> None:
        ranks, stages = range(problem.num_ranks), range(problem.num_stages)
        self.problem = problem
        self.forward_ready: list[list[float]] = [[] for _ in stages]
        self.forward_ready[0] = [0.0] * problem.num_microbatches
        self.backward_ready: list[list[float]] = [[] for _ in stages]
        self.num_forward = [0 for _ in stages]
        self.num_backward = [0 for _ in stages]
        self.pending: list[deque[tuple[int, int]]] = [deque() for _ in ranks]
        self.free = [0.0 for _ in ranks]
        self.memory = [0.0 for _ in ranks]
        self.idle = [0.0 for _ in ranks]
        self.actions: list[list[Action]] = [[] for _ in ranks]

    def next_forward(self, stage: int) -> float:
        """Return when the next F of a stage can start; ``inf`` if that is not known."""
        ready, index = self.forward_ready[stage], self.num_forward[stage]
        return ready[index] if index < len(ready) else inf

    def next_backward(self, stage: int) -> float:
        """Return when the next B of a stage can start; ``inf`` if that is not known."""
        ready, index = self.backward_ready[stage], self.num_backward[stage]
        return ready[index] if index < len(ready) else inf

    def has_room(self, rank: int, memory: float) -> bool:
        """Whether a rank can hold this much more."""
        return self.memory[rank] + memory <= self.problem.memory_limit * (1 + ROUNDING)

    def run(self, rank: int, kind: Kind, stage: int, now: float) -> tuple[int, float] | None:
        """Run F or B, and return the rank that can go on by it and when, if there is one."""
        problem = self.problem
        forward = kind is Kind.F
        counts = self.num_forward if forward else self.num_backward
        # A stage takes its microbatches in order.
        microbatch = counts[stage]
        counts[stage] += 1
        seconds = (problem.forward if forward else problem.backward_input)[stage]
        self.memory[rank] += (problem.activation if forward else problem.growth)[stage]
        if not forward:
            self.pending[rank].append((stage, microbatch))
        self._occupy(rank, Action(kind, stage, microbatch), now, seconds)
        return self._hand_on(forward, stage, now + seconds)

    def run_weight(self, rank: int, now: float) -> None:
        """Run the oldest W of a rank."""
        stage, microbatch = self.pending[rank].popleft()
        self.memory[rank] -= self.problem.residue[stage]
        seconds = self.problem.backward_weight[stage]
        self._occupy(rank, Action(Kind.W, stage, microbatch), now, seconds)

    def _occupy(self, rank: int, action: Action, now: float, seconds: float) -> None:
        if self.actions[rank]:
            self.idle[rank] += now - self.free[rank]
        self.actions[rank].append(action)
        self.free[rank] = now + seconds

    def _hand_on(self, forward: bool, stage: int, end: float) -> tuple[int, float] | None:
        last = stage == self.problem.num_stages - 1
        if forward and last:
            self.backward_ready[stage].append(end)
            return None
        to = stage + 1 if forward else stage - 1
        if to < 0:
            return None
        # A hop goes by the stage before it, whichever way the message travels.
        arrival = end + self.problem.hop[min(stage, to)]
        (self.forward_ready if forward else self.backward_ready)[to].append(arrival)
        return self.problem.placement[to], arrival


class Filled(NamedTuple):
    """What a run gives.

    Attributes:
        schedule: Every action in its place; None if the run was given up.
        longest_span: Seconds of the rank with the longest span, as far as it got.
        num_actions: How many actions were placed.
    """

    schedule: Schedule | None
    longest_span: float
    num_actions: int


class Wanted(NamedTuple):
    """What a rank runs next.

    Attributes:
        kind: F or B.
        stage: One of the rank's stages.
        ready: When it can start; ``inf`` if that is not known yet.
        room: The memory that must be free before it starts.
    """

    kind: Kind
    stage: int
    ready: float
    room: float


class OrderRule(Protocol):
    """Which F or B a rank runs next; made anew for every run."""

    def next(self, progress: Progress, rank: int, now: float) -> Wanted | None:
        """Return what the rank wants to run next, ready or awaited; None if it knows of nothing."""

    def instead(self, progress: Progress, rank: int, now: float) -> Wanted | None:
        """Return what is ready and may run where waiting for what is next takes too long."""

    def started(self, rank: int, wanted: Wanted) -> None:
        """Note what the rank has started."""


class _Run:
    """One run through time, rank by rank as each is free or something arrives."""

    def __init__(self, problem: Problem, order: OrderRule, patience: float | None) -> None:
        self.problem = problem
        self.order = order
        self.is_patient = patience is not None
        self.tolerated = max(problem.work) + (patience or 0.0)
        self.longest = max(problem.work)
        self.progress = Progress(problem)

    def result(self, shorter_than: float) -> Filled:
        """Run until nothing is left to do, or it gets stuck or takes too long."""
        events = [(0.0, 0)]
        progress, work = self.progress, self.problem.work
        while events and self.longest < shorter_than:
            now, rank = heappop(events)
            # Something has arrived while the rank computes: it looks again when it is free.
            if progress.free[rank] > now:
                continue
            for event in self._step(rank, now):
                heappush(events, event)
            # What it has idled and all of its work: the least that its span can come to.
            self.longest = max(self.longest, progress.idle[rank] + work[rank])
        num_actions = sum(map(len, progress.actions))
        complete = num_actions == 3 * self.problem.num_microbatches * self.problem.num_stages
        schedule = Schedule.of(progress.actions) if complete else None
        return Filled(schedule, self.longest, num_actions)

    def _step(self, rank: int, now: float) -> list[tuple[float, int]]:
        """Start something on a rank that is free, or let it wait; return when to look again."""
        progress = self.progress
        wanted = self._choose(rank, now)
        if wanted is None:
            return []
        if wanted.kind is Kind.W:
            progress.run_weight(rank, now)
            return [(progress.free[rank], rank)]
        handed_on = progress.run(rank, wanted.kind, wanted.stage, now)
        self.order.started(rank, wanted)
        events = [(progress.free[rank], rank)]
        if handed_on:
            other, arrival = handed_on
            events.append((arrival, other))
        return events

    def _choose(self, rank: int, now: float) -> Wanted | None:
        """Return what to start now: what is next, W, something else; None: wait."""
        pending = self.progress.pending[rank]
        weight = Wanted(Kind.W, pending[0][0], now, room=0.0) if pending else None
        wanted = self.order.next(self.progress, rank, now)
        if wanted is None:
            return weight
        # Nothing but the rank's own W and B frees its memory.
        if not self.progress.has_room(rank, wanted.room):
            return weight or self.order.instead(self.progress, rank, now)
        if wanted.ready <= now:
            return wanted
        gap = wanted.ready - now
        if weight and self.problem.backward_weight[weight.stage] <= gap:
            return weight
        if self._may_wait(rank, gap):
            return None
        return self.order.instead(self.progress, rank, now) or weight

    def _may_wait(self, rank: int, gap: float) -> bool:
        """Whether waiting, so that nothing downstream is late, leaves the longest span as it is."""
        span = self.progress.idle[rank] + self.problem.work[rank] + gap
        return self.is_patient and span <= max(self.longest, self.tolerated)


def fill_gaps(
    problem: Problem, order: OrderRule, patience: float | None, shorter_than: float = inf
) -> Filled:
    """Put W into an order of F and B, and time the result.

    W runs where the next F or B lacks memory, where it fits before the next one can start, and at
    the end. Where a gap is too short for W, the rank either waits or is late.

    Takes time proportional to the number of actions: about 10 microseconds each.

    Args:
        problem: The pipeline.
        order: Which F or B is next on each rank; used up by the run.
        patience: How many seconds, in all, a rank waits through gaps that are too short for W; more
            as long as another rank's span stays the longest. None: it never waits, but runs W, and
            what comes next is late.
        shorter_than: The run is given up when the longest span reaches this many seconds.
    """
    return _Run(problem, order, patience).result(shorter_than)


class _Rounds:
    """One run through an order, in which no B overtakes."""

    def __init__(self, problem: Problem, order: OrderRule, is_patient_before_b: bool) -> None:
        self._problem, self._order = problem, order
        self._is_patient_before_b = is_patient_before_b
        self._progress = Progress(problem)
        self._num_done = [0] * problem.num_ranks
        self._agenda = [(0, rank) for rank in range(problem.num_ranks)]
        self._waiting: set[int] = set()
        self._longest = max(problem.work)

    def result(self, shorter_than: float) -> Filled:
        """Run until nothing is left to do, or it gets stuck or takes too long."""
        while self._agenda and self._longest < shorter_than:
            _, rank = heappop(self._agenda)
            wanted = self._order.next(self._progress, rank, self._progress.free[rank])
            if wanted is None:
                continue
            if wanted.ready == inf:
                self._waiting.add(rank)
            elif self._makes_room(rank, wanted):
                self._run(rank, wanted)
        return self._filled(shorter_than)

    def _filled(self, shorter_than: float) -> Filled:
        actions = self._progress.actions
        for rank, pending in enumerate(self._progress.pending):
            while pending:
                self._run_weight(rank)
        num_actions = sum(map(len, actions))
        complete = num_actions == 3 * self._problem.num_microbatches * self._problem.num_stages
        is_shorter = complete and self._longest < shorter_than
        return Filled(Schedule.of(actions) if is_shorter else None, self._longest, num_actions)

    def _makes_room(self, rank: int, wanted: Wanted) -> bool:
        """Run W until there is room, and those that fit before what is wanted can start."""
        pending = self._progress.pending[rank]
        while pending and (not self._has_room(rank, wanted) or self._fits_before(rank, wanted)):
            self._run_weight(rank)
        return self._has_room(rank, wanted)

    def _has_room(self, rank: int, wanted: Wanted) -> bool:
        return self._progress.has_room(rank, wanted.room)

    def _fits_before(self, rank: int, wanted: Wanted) -> bool:
        stage, _ = self._progress.pending[rank][0]
        return self._problem.backward_weight[stage] <= wanted.ready - self._progress.free[rank]

    def _run_weight(self, rank: int) -> None:
        self._progress.run_weight(rank, self._progress.free[rank])

    def _run(self, rank: int, wanted: Wanted) -> None:
        progress = self._progress
        if progress.pending[rank] and not self._may_wait(rank, wanted):
            self._run_weight(rank)
        start = max(progress.free[rank], wanted.ready)
        handed_on = progress.run(rank, wanted.kind, wanted.stage, start)
        self._order.started(rank, wanted)
        self._longest = max(self._longest, progress.idle[rank] + self._problem.work[rank])
        self._num_done[rank] += 1
        self._look_again(rank)
        if handed_on and handed_on[0] in self._waiting:
            self._waiting.remove(handed_on[0])
            self._look_again(handed_on[0])

    def _look_again(self, rank: int) -> None:
        heappush(self._agenda, (self._num_done[rank], rank))

    def _may_wait(self, rank: int, wanted: Wanted) -> bool:
        gap = max(0.0, wanted.ready - self._progress.free[rank])
        if self._is_patient_before_b and wanted.kind is Kind.B:
            return True
        return self._progress.idle[rank] + self._problem.work[rank] + gap <= self._longest


def fill_rounds(
    problem: Problem, order: OrderRule, is_patient_before_b: bool, shorter_than: float = inf
) -> Filled:
    """Put W into an order of F and B, and time the result.

    W runs where the next F or B lacks memory, where it fits before the next one can start, and at
    the end; in a gap that is too short for it where waiting would make the longest span longer.
    Takes time proportional to the number of actions.

    Args:
        problem: The pipeline.
        order: The order, without leave to overtake; used up by the run.
        is_patient_before_b: Whether a rank waits for B through every gap that is too short for W.
        shorter_than: The run is given up when the longest span reaches this many seconds.
    """
    return _Rounds(problem, order, is_patient_before_b).result(shorter_than)

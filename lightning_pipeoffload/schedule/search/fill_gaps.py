"""Run the ranks of a pipeline in time and put W where they would wait or lack memory.

Zero-bubble schedules decide on the order of F and B; W follows from it. Nothing waits for W but the
memory that it frees, so it runs when the memory is needed, or when a rank would be idle. This file
is that second half; what is the first is an ``OrderRule``.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import NamedTuple, Protocol

from ..actions import Kind
from ..schedule import Schedule
from .problem import Problem
from .progress import Progress

__all__ = ["Filled", "OrderRule", "Wanted", "fill_gaps"]


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

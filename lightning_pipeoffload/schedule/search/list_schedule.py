"""The list scheduler: the ranks of a pipeline run forward in time, and each starts what comes next.

Zero-bubble schedules decide on the order of F and B; W follows from it. Nothing waits for W but the
memory that it frees, so it runs when the memory is needed, or when a rank would be idle. A subclass
of :class:`ListScheduler` decides what a rank starts. There are three: ``fill_gaps`` takes the ranks
by the clock and ``fill_rounds`` by how far they are, both with F and B as an :class:`OrderRule`
says; ``squeeze`` keeps to the order of a building block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple, Protocol

from ..schedule import Schedule
from .problem import ROUNDING, Operations, Order, Pass, SchedulingProblem


class ListScheduler:
    """Runs F, B and W of all ranks; the rank with the lowest key, by default a time, comes first.

    A stage takes its microbatches in order.

    Attributes:
        operations: The operations, and their seconds.
        arrivals: For every F and B, when each microbatch that has arrived can start.
        num_started: For every F and B, how many have started; the next one's microbatch.
        pending: W of every rank that can run, oldest first.
        clock: The end of every rank's running action.
        memory: Memory of every rank.
        idle: Seconds that every rank has waited since it first started something.
        done: The passes that every rank has run.
        longest: A lower bound on the longest span of a rank.
    """

    def __init__(
        self, operations: Operations, num_microbatches: int, growth: Sequence[float]
    ) -> None:
        num_waiting, ranks = 2 * operations.num_stages, range(max(operations.ranks) + 1)
        self.operations, self._growth = operations, growth
        self._seconds, self._latencies = operations.seconds, operations.latencies
        self._ranks, self._num_stages = operations.ranks, operations.num_stages
        self._last = num_waiting - 1
        self.arrivals: list[list[float]] = [[] for _ in range(num_waiting)]
        self.arrivals[0] = [0.0] * num_microbatches
        self.num_started = [0] * num_waiting
        self.pending: list[deque[Pass]] = [deque() for _ in ranks]
        self.clock = [0.0 for _ in ranks]
        self.memory = [0.0 for _ in ranks]
        self.idle = [0.0 for _ in ranks]
        self.done: Order = [[] for _ in ranks]
        self.longest = 0.0
        self._agenda: list[tuple[float, int]] = [(0.0, rank) for rank in ranks]

    def run(self, shorter_than: float = inf) -> None:
        """Run until nothing is left to do, or no rank can go on, or it takes too long."""
        agenda = self._agenda
        while agenda and self.longest < shorter_than:
            key, rank = heappop(agenda)
            self.start_next(rank, key)

    def start_next(self, rank: int, key: float) -> None:
        """Start something on a rank, or leave it until something arrives."""
        raise NotImplementedError

    def next_ready_time(self, operation: int) -> float:
        """Return when the next F or B of a stage can start; ``inf`` if that is not known."""
        ready, index = self.arrivals[operation], self.num_started[operation]
        return ready[index] if index < len(ready) else inf

    def start(self, rank: int, operation: int, time: float) -> None:
        """Run an F or B."""
        num_started = self.num_started
        microbatch = num_started[operation]
        num_started[operation] = microbatch + 1
        end = self.execute(rank, (operation, microbatch), time)
        if operation >= self._num_stages and not self.operations.is_fused:
            self.pending[rank].append((operation + self._num_stages, microbatch))
        if operation < self._last:
            arrival = end + self._latencies[operation]
            self.arrivals[operation + 1].append(arrival)
            self.requeue_on_arrival(self._ranks[operation + 1], arrival)

    def start_weight_grad(self, rank: int, time: float) -> None:
        """Run the oldest W."""
        self.execute(rank, self.pending[rank].popleft(), time)

    def execute(self, rank: int, started: Pass, time: float) -> float:
        done, operation = self.done[rank], started[0]
        if done:
            self.idle[rank] += time - self.clock[rank]
        done.append(started)
        self.memory[rank] += self._growth[operation]
        end = self.clock[rank] = time + self._seconds[operation]
        return end

    def requeue_on_arrival(self, rank: int, arrival: float) -> None:
        """Give a rank a turn when something arrives; a busy one has a turn when it is free."""
        if arrival >= self.clock[rank]:
            heappush(self._agenda, (arrival, rank))

    def requeue(self, rank: int) -> None:
        """Give a rank a turn when it is free."""
        heappush(self._agenda, (self.clock[rank], rank))


class NextOperation(NamedTuple):
    """The next operation of a rank.

    Attributes:
        operation: An F or B of the rank; -1: W.
        ready: When it can start; ``inf`` if that is not known yet.
        room: The memory that must be free before it starts.
    """

    operation: int
    ready: float = 0.0
    room: float = 0.0


_WEIGHT = NextOperation(-1)


class OrderRule(Protocol):
    """Chooses the next F or B of a rank; a new object for every run."""

    def next(self, filler: GapFiller, rank: int, now: float) -> NextOperation | None:
        """Return the next action of the rank, ready or awaited; None if none is known."""

    def alternative(self, filler: GapFiller, rank: int, now: float) -> NextOperation | None:
        """Return a ready action to run if the next one would take too long to wait for."""

    def started(self, rank: int, operation: int) -> None:
        """Note what the rank has started."""


class ListedOrder(NamedTuple):
    """The result of a run.

    Attributes:
        order: All passes; None if the run was given up.
        longest_span: Seconds of the rank with the longest span, as far as it got.
        num_actions: How many passes were placed.
    """

    order: Order | None
    longest_span: float
    num_actions: int


class GapFiller(ListScheduler):
    """Puts W into an order of F and B."""

    def __init__(self, problem: SchedulingProblem, rule: OrderRule) -> None:
        super().__init__(problem.operations, problem.num_units, problem.growth)
        self.problem, self.rule = problem, rule
        self.longest = max(problem.work)

    def has_room(self, rank: int, memory: float) -> bool:
        """Whether a rank can hold this much more."""
        return self.memory[rank] + memory <= self.problem.memory_limit * (1 + ROUNDING)

    def weight_grad_fits(self, rank: int, seconds: float) -> bool:
        """Whether the oldest W takes no longer than this."""
        return self._seconds[self.pending[rank][0][0]] <= seconds

    def span(self, rank: int) -> float:
        """Return a rank's idle time so far plus all of its work: its least possible span."""
        return self.idle[rank] + self.problem.work[rank]

    def result(self) -> ListedOrder:
        """Return the result."""
        num_actions = sum(map(len, self.done))
        complete = num_actions == 3 * self.problem.num_units * self.problem.num_stages
        return ListedOrder(self.done if complete else None, self.longest, num_actions)


class _ClockGapFiller(GapFiller):
    """Gives the turn to the rank that is free first."""

    def __init__(self, problem: SchedulingProblem, rule: OrderRule, patience: float | None) -> None:
        super().__init__(problem, rule)
        self._is_patient = patience is not None
        self._tolerated = max(problem.work) + (patience or 0.0)

    def start_next(self, rank: int, key: float) -> None:
        if self.clock[rank] > key:
            return
        wanted = self._choose(rank, key)
        if wanted is None:
            return
        if wanted is _WEIGHT:
            self.start_weight_grad(rank, key)
        else:
            self.start(rank, wanted.operation, key)
            self.rule.started(rank, wanted.operation)
        self.requeue(rank)
        self.longest = max(self.longest, self.span(rank))

    def _choose(self, rank: int, now: float) -> NextOperation | None:
        """Return what to start now: what is next, W, something else; None: wait."""
        weight = _WEIGHT if self.pending[rank] else None
        wanted = self.rule.next(self, rank, now)
        if wanted is None:
            return weight
        # Only the rank's own W and B free its memory.
        if not self.has_room(rank, wanted.room):
            return weight or self.rule.alternative(self, rank, now)
        if wanted.ready <= now:
            return wanted
        gap = wanted.ready - now
        if weight and self.weight_grad_fits(rank, gap):
            return weight
        # Where waiting leaves the longest span as it is, nothing downstream is late.
        if self._is_patient and self.span(rank) + gap <= max(self.longest, self._tolerated):
            return None
        return self.rule.alternative(self, rank, now) or weight


class _SliceClockGapFiller(_ClockGapFiller):
    """The same for slices, of which the last stage returns none before it has a microbatch's last.

    The k-th backward of a stage is of its microbatch's k-th slice from the end.
    """

    def __init__(self, problem: SchedulingProblem, rule: OrderRule, patience: float | None) -> None:
        super().__init__(problem, rule, patience)
        self._num_slices = problem.num_slices
        self._unit_seconds, self._unit_growth = problem.unit_seconds, problem.unit_growth

    def start(self, rank: int, operation: int, time: float) -> None:
        if operation != self._num_stages - 1:
            super().start(rank, operation, time)
            return
        unit = self.num_started[operation]
        self.num_started[operation] = unit + 1
        end = self.execute(rank, (operation, unit), time)
        if (unit + 1) % self._num_slices == 0:
            self.arrivals[operation + 1] += [end] * self._num_slices
            self.requeue_on_arrival(rank, end)

    def execute(self, rank: int, started: Pass, time: float) -> float:
        operation, place = started[0], started[1] % self._num_slices
        memory = self.memory[rank] + self._unit_growth[operation][place]
        super().execute(rank, started, time)
        # Replace those of the mean slice.
        self.memory[rank] = memory
        end = self.clock[rank] = time + self._unit_seconds[operation][place]
        return end


def fill_gaps(
    problem: SchedulingProblem, rule: OrderRule, patience: float | None, shorter_than: float = inf
) -> ListedOrder:
    """Put W into an order of F and B, and time the result.

    W runs where the next F or B lacks memory, where it fits before the next one can start, and at
    the end. Where a gap is too short for W, the rank either waits or is late.

    Takes time proportional to the number of actions: about 10 microseconds each.

    Args:
        rule: Which F or B is next on each rank; used up by the run.
        patience: How many seconds, in all, a rank waits through gaps that are too short for W; more
            as long as another rank's span stays the longest. None: it never waits, but runs W, and
            what comes next is late.
        shorter_than: The run is given up when the longest span reaches this many seconds.
    """
    by_clock = _ClockGapFiller if problem.num_slices == 1 else _SliceClockGapFiller
    filler = by_clock(problem, rule, patience)
    filler.run(shorter_than)
    return filler.result()


class _RoundGapFiller(GapFiller):
    """Gives the turn to the rank that has run the fewest F and B; no B overtakes."""

    def __init__(
        self, problem: SchedulingProblem, rule: OrderRule, is_patient_before_b: bool
    ) -> None:
        super().__init__(problem, rule)
        self._is_patient_before_b = is_patient_before_b
        self._num_done = [0] * problem.num_ranks
        self._waiting: set[int] = set()

    def start_next(self, rank: int, key: float) -> None:
        wanted = self.rule.next(self, rank, self.clock[rank])
        if wanted is None:
            return
        if wanted.ready == inf:
            self._waiting.add(rank)
        elif self._run_weight_grads_for_room(rank, wanted):
            if self.pending[rank] and not self._may_wait(rank, wanted):
                self.start_weight_grad(rank, self.clock[rank])
            self._num_done[rank] += 1
            self.start(rank, wanted.operation, max(self.clock[rank], wanted.ready))
            self.rule.started(rank, wanted.operation)
            self.longest = max(self.longest, self.span(rank))
            self.requeue(rank)

    def _run_weight_grads_for_room(self, rank: int, wanted: NextOperation) -> bool:
        """Run W until there is room, and those that fit before what is wanted can start."""
        while self.pending[rank] and (
            not self.has_room(rank, wanted.room)
            or self.weight_grad_fits(rank, wanted.ready - self.clock[rank])
        ):
            self.start_weight_grad(rank, self.clock[rank])
        return self.has_room(rank, wanted.room)

    def _may_wait(self, rank: int, wanted: NextOperation) -> bool:
        if self._is_patient_before_b and wanted.operation >= self._num_stages:
            return True
        gap = max(0.0, wanted.ready - self.clock[rank])
        return self.span(rank) + gap <= self.longest

    def requeue_on_arrival(self, rank: int, arrival: float) -> None:
        if rank in self._waiting:
            self._waiting.remove(rank)
            self.requeue(rank)

    def requeue(self, rank: int) -> None:
        heappush(self._agenda, (self._num_done[rank], rank))


def fill_rounds(
    problem: SchedulingProblem,
    rule: OrderRule,
    is_patient_before_b: bool,
    shorter_than: float = inf,
) -> ListedOrder:
    """Put W into an order of F and B, and time the result.

    W runs where the next F or B lacks memory, where it fits before the next one can start, and at
    the end; in a gap that is too short for it where waiting would make the longest span longer.
    Takes time proportional to the number of actions.

    Args:
        rule: The order, in which no B may overtake; used up by the run.
        is_patient_before_b: Whether a rank waits for B through every gap that is too short for W.
        shorter_than: The run is given up when the longest span reaches this many seconds.
    """
    filler = _RoundGapFiller(problem, rule, is_patient_before_b)
    filler.run(shorter_than)
    for rank, pending in enumerate(filler.pending):
        while pending:
            filler.start_weight_grad(rank, filler.clock[rank])
    filled = filler.result()
    return filled if filled.longest_span < shorter_than else filled._replace(order=None)


class ScheduleSearch:
    """Candidates for a schedule of one problem; each is timed until it is longer than the best.

    Attributes:
        best: The order with the shortest longest span so far.
        longest_span: Its seconds.
    """

    def __init__(self, problem: SchedulingProblem, num_actions: int) -> None:
        """Start without a candidate.

        Args:
            num_actions: How many actions all candidates after the first complete one may place.
        """
        self.best: Order | None = None
        self.longest_span = inf
        self._problem = problem
        self._num_actions_left = num_actions

    def consider(self, rule: OrderRule, patience: float | None) -> None:
        """Complete an order of F and B, and keep it if it is shorter than all before.

        Args:
            rule: The order.
            patience: Seconds, as for ``fill_gaps``.
        """
        if self.best is None or (self._num_actions_left > 0 and not self.has_no_bubble):
            self._keep_best(fill_gaps(self._problem, rule, patience, self.longest_span))

    def consider_rounds(self, rule: OrderRule, is_patient_before_b: bool) -> None:
        """Complete an order round by round, and keep it if it is shorter than all before.

        The budget does not count, for it is little work.

        Args:
            rule: The order, in which no B may overtake.
            is_patient_before_b: As for ``fill_rounds``.
        """
        if not self.has_no_bubble:
            self._keep_best(
                fill_rounds(self._problem, rule, is_patient_before_b, self.longest_span)
            )

    def _keep_best(self, filled: ListedOrder) -> None:
        self._num_actions_left -= filled.num_actions
        if filled.order is not None:
            self.best, self.longest_span = filled.order, filled.longest_span

    @property
    def has_no_bubble(self) -> bool:
        """Whether the best takes no longer than some rank's work, so that nothing is shorter."""
        return self.longest_span <= max(self._problem.work) * (1 + ROUNDING)

    def shortest(self) -> Schedule:
        """Return the best schedule.

        Raises:
            RuntimeError: No candidate fits the memory.
        """
        if self.best is None:
            raise RuntimeError(
                "no candidate fits the memory limit; one that always fits is missing"
            )
        return self._problem.operations.as_schedule(self.best)

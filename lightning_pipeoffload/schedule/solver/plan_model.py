"""The model of a whole step: every order and copy that a plan may have, and the shortest of them.

Intervals in time: no two on a rank's compute lane, on a copy lane or on a link that ranks share,
and of what is on a device no more than the limit at any time. Microbatches of a stage are alike, so
each kind of action takes them in their order, which loses nothing and spares the solver most of the
orders.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from ..actions import Action, Kind
from ..costs import Costs
from ..placement import stages_on
from ..schedule import Schedule
from .hinted_model import Hinted, HintedModel, cp_model
from .pass_model import CopyModel, PassModel, stays
from .plan_problem import earliest_end, earliest_starts, most_work
from .whole_costs import StartTimes, WholeCosts

__all__ = ["PlanModel", "SolverLimits", "read_plan"]


# Of what is at one time: memory is let go before any is taken.
_FREE, _COPY, _COMPUTE = range(3)


class _Entry(NamedTuple):
    begin: int
    turn: int
    start: int  # of a copy; of what computes the end, so that what takes no time comes first
    step: int  # F, B, W
    action: Action


def read_plan(
    passes: Iterable[PassModel], placement: tuple[int, ...], value: Callable[[Hinted], int]
) -> Schedule:
    """Return the plan of a solution.

    Args:
        passes: Every stage and microbatch.
        placement: The rank of every stage.
        value: Gives the value of a number.
    """
    ranks: list[list[_Entry]] = [[] for _ in range(max(placement) + 1)]
    for of in passes:
        ranks[placement[of.place[0]]] += _entries(of, value)
    orders = ([entry.action for entry in sorted(_in_turn(rank))] for rank in ranks)
    return Schedule.of(orders, "optpipe")


def _entries(of: PassModel, value: Callable[[Hinted], int]) -> Iterator[_Entry]:
    for step, (kind, begin) in enumerate(of.begins.items()):
        yield _Entry(value(begin), _COMPUTE, value(of.ends[kind]), step, of.action(kind))
    if of.copies is None:
        return
    offload, reload, queue, rest, in_parts = of.copies

    def offloaded(copy: CopyModel, kind: Kind, saved_by: Kind, freed_by: Kind) -> Iterator[_Entry]:
        if value(copy.flag):
            ready = value(of.ends[saved_by])
            yield _Entry(ready, _COPY, value(copy.start), 0, of.action(kind))
            yield _Entry(value(copy.end), _FREE, 0, 0, of.action(freed_by))

    def reloaded(copy: CopyModel, kind: Kind) -> Iterator[_Entry]:
        if value(copy.flag):
            yield _Entry(value(copy.begin), _COPY, value(copy.start), 0, of.action(kind))

    yield from offloaded(offload, Kind.OFFLOAD, Kind.F, Kind.FREE)
    yield from reloaded(reload, Kind.RELOAD_B if value(in_parts) else Kind.RELOAD)
    yield from offloaded(queue, Kind.OFFLOAD_W, Kind.B, Kind.FREE_W)
    yield from reloaded(rest, Kind.RELOAD_W)


def _in_turn(entries: list[_Entry]) -> Iterator[_Entry]:
    """Let a rank begin each copy before the last action that starts by then, so in their turn.

    It begins no copy in the middle of an action; one that has begun waits for its lane.
    """
    begins = sorted(entry.begin for entry in entries if entry.turn == _COMPUTE)
    for entry in entries:
        before = bisect_right(begins, entry.start)
        if entry.turn == _COPY and before:
            yield entry._replace(begin=max(entry.begin, begins[before - 1]))
        else:
            yield entry


_KINDS = (Kind.F, Kind.B, Kind.W)

# Ranks that begin later, so that steps fit into each other, may end later, too.
_ROOM_TO_OVERLAP = 1.25

_WHOLE_UP_TO = 64  # stages times microbatches
_WINDOWS_FROM = 128
# What is left solves windows of the order, in turn.
_NOT_IN_WINDOWS = (
    *("graph_arc_lns", "graph_cst_lns", "graph_dec_lns", "graph_var_lns"),
    *("rnd_cst_lns", "rnd_var_lns", "scheduling_intervals_lns"),
)


@dataclass(frozen=True)
class SolverLimits:
    """What a solver may take.

    Attributes:
        seconds: Seconds.
        num_workers: Threads.
    """

    seconds: float
    num_workers: int = 2


class PlanModel:
    """All plans of a step that take no longer than one that there is.

    Args:
        whole: What the stages cost, and the limit.
        costs: Which copies run at a time.
        plan: The plan that there is, with B and W apart.
        has_barrier: Whether a step ends when all ranks have ended it; else when each has.

    Attributes:
        passes: Every stage and microbatch.
        hint: When the plan that there is does what.
    """

    def __init__(
        self, whole: WholeCosts, costs: Costs, plan: Schedule, has_barrier: bool = True
    ) -> None:
        self._whole, self._costs, self._plan = whole, costs, plan
        self._has_barrier = has_barrier
        self.hint = StartTimes.of(plan, costs, whole, has_barrier)
        room = 1.0 if has_barrier else _ROOM_TO_OVERLAP
        self._model = HintedModel(round(self.hint.makespan * room))
        self.passes = self._make_passes()
        self._add_orders()
        self._add_lanes()
        self._add_memory()

    def _make_passes(self) -> dict[tuple[int, int], PassModel]:
        whole, count = self._whole, self._plan.num_microbatches
        first = earliest_starts(whole.seconds, whole.hops)
        tight = [whole.is_tight(rank, count) for rank in range(whole.num_ranks)]

        def make(place: tuple[int, int]) -> PassModel:
            stage, microbatch = place
            earliest = {
                kind: round(first[kind][stage]) + microbatch * whole.seconds[kind][stage]
                for kind in _KINDS
            }
            copies = tight[whole.placement[stage]]
            return PassModel(self._model, whole, place, self.hint, earliest, copies)

        places = product(range(len(whole.placement)), range(count))
        return {place: make(place) for place in places}

    def _add_orders(self) -> None:
        """Let stages follow each other, and the microbatches of a stage."""
        for (stage, microbatch), now in self.passes.items():
            if previous := self.passes.get((stage - 1, microbatch)):
                hop = self._whole.hops[stage - 1]
                self._model.after(now.begins[Kind.F], previous.ends[Kind.F].plus(hop))
                self._model.after(previous.begins[Kind.B], now.ends[Kind.B].plus(hop))
            if before := self.passes.get((stage, microbatch - 1)):
                for kind in _KINDS:
                    self._model.after(now.begins[kind], before.ends[kind])

    def _add_lanes(self) -> None:
        lanes: defaultdict[Hashable, list[Any]] = defaultdict(list)
        for place, of in self.passes.items():
            rank = self._whole.placement[place[0]]
            lanes[rank] += of.work()
            for back, copy in of.lanes:
                for lane in self._lanes_of(rank, back):
                    lanes[lane].append(copy.interval)
        for intervals in lanes.values():
            self._model.model.add_no_overlap(intervals)

    def _lanes_of(self, rank: int, back: bool) -> Iterator[Hashable]:
        yield rank, "copies", back and self._costs.copy_lanes == 2
        if self._costs.ranks_per_link > 1:
            yield rank // self._costs.ranks_per_link, "link", back

    def _add_memory(self) -> None:
        of_rank: defaultdict[int, list[Any]] = defaultdict(list)
        for place, of in self.passes.items():
            if of.copies is not None:
                of_rank[self._whole.placement[place[0]]] += stays(self._model, of, of.copies)
        for there in of_rank.values():
            intervals, grains = zip(*there, strict=True)
            self._model.model.add_cumulative(intervals, grains, self._whole.limit)

    def solve(self, limits: SolverLimits, found: Callable[[Schedule], bool]) -> bool:
        """Look for shorter plans.

        Args:
            limits: What it may take.
            found: Called with every plan that is shorter than all before; whether to go on.

        Returns:
            Whether nothing shorter is left to be found.
        """
        model = self._model
        model.model.minimize(self._objective(self._step()))
        solver = cp_model().CpSolver()
        solver.parameters.max_time_in_seconds = limits.seconds
        solver.parameters.num_workers = limits.num_workers
        solver.parameters.use_lns_only = self._is_large
        if len(self.passes) > _WINDOWS_FROM:
            solver.parameters.ignore_subsolvers.extend(_NOT_IN_WINDOWS)
        status = solver.solve(model.model, self._listener(found))
        return bool(status == cp_model().OPTIMAL)

    def _step(self) -> Hinted:
        """Add what a step takes: until all ranks have ended it, or the rank that takes longest."""
        whole, count = self._whole, self._plan.num_microbatches
        given = whole.placement, count
        if self._has_barrier:
            least = earliest_end(whole.seconds, whole.hops, *given)
        else:
            least = most_work(whole.seconds, *given)
        began = [self._began(rank) for rank in range(whole.num_ranks)]
        spans = (end - start.hint for end, start in zip(self.hint.ends, began, strict=True))
        step = self._model.number(max(spans), round(least))
        for (stage, microbatch), of in self.passes.items():
            if microbatch == count - 1:
                start = began[whole.placement[stage]]
                end = of.ends[Kind.W]
                self._model.after(Hinted(step.now + start.now, step.hint + start.hint), end)
        return step

    def _began(self, rank: int) -> Hinted:
        """Return when a rank's step begins: with its first action, unless all begin at once."""
        if self._has_barrier:
            return Hinted(0, 0)
        first = min(stages_on(self._whole.placement, rank))
        return self.passes[first, 0].begins[Kind.F]

    @property
    def _is_large(self) -> bool:
        """Whether only parts are solved at a time."""
        return len(self.passes) > _WHOLE_UP_TO

    def _objective(self, step: Hinted) -> Any:
        """Return what is to be small.

        A part alone seldom makes the whole shorter. So where parts are solved what ends earlier
        counts as well: it makes room for the next part.
        """
        if not self._is_large:
            return step.now
        ends = sum(of.ends[Kind.B].now for of in self.passes.values())
        return step.now * len(self.passes) + ends

    def _listener(self, found: Callable[[Schedule], bool]) -> Any:
        passes, whole = self.passes, self._whole

        class Listener(cp_model().CpSolverSolutionCallback):  # type: ignore[misc] # an extra's
            def on_solution_callback(self) -> None:
                def value(number: Hinted) -> int:
                    return int(self.value(number.now))

                if not found(read_plan(passes.values(), whole.placement, value)):
                    self.stop_search()

        return Listener()

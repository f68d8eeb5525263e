"""The model of a whole step: every order and copy that a plan may have, and the shortest of them.

Intervals in time: no two on a rank's compute lane, on a copy lane or on a link that ranks share,
and of what is on a device no more than the limit at any time. Microbatches of a stage are alike, so
each kind of action takes them in their order, which loses nothing and spares the solver most of the
orders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..actions import Kind
from ..costs import Costs
from ..lower_bound import earliest_end, earliest_starts, most_work
from ..placement import stages_on
from ..schedule import Schedule
from .cp_sat import cp_model
from .hinted_model import Hinted, HintedModel
from .pass_model import PassModel
from .read_plan import read_plan
from .residency import stays
from .start_times import StartTimes
from .whole_costs import WholeCosts

__all__ = ["PlanModel", "SolverLimits"]

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

"""The model of a whole step: every order and copy that a plan may have, and the shortest of them.

Intervals in time: no two on a rank's compute lane, on a copy lane or on a link that ranks share,
and of what is on a device no more than the limit at any time. Microbatches of a stage are alike, so
each kind of action takes them in their order, which loses nothing and spares the solver most of the
orders. Every variable has a hint, its value in a plan that there is, from which the solver starts.

When the parts are on the device, from F over OFFLOAD, RELOAD_B, B, OFFLOAD_W and RELOAD_W to W::

    FOR_B     F ======= OFFLOAD     RELOAD_B == B
    FOR_W     F ======= OFFLOAD                                   RELOAD_W == W
    GRADIENT                                    B == OFFLOAD_W    RELOAD_W == W

OR-tools is an extra: it is imported where a plan is solved, and nowhere else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

from ..actions import ACTIVATION, RELOADS, WAITING, Action, Kind, MemoryPart, ScheduleError
from ..costs import Costs
from ..schedule import Schedule, stages_on
from .plan_problem import (
    IntegerCosts,
    StartTimes,
    earliest_starts,
    makespan_lower_bound,
    max_rank_work,
)


def check_solver() -> None:
    """Check that the solver is installed, without loading it.

    Raises:
        ScheduleError: OR-tools is not installed.
    """
    if find_spec("ortools") is None:
        raise ScheduleError(
            "schedule=optpipe needs OR-tools, which is not installed; run: "
            "pip install 'lightning-pipeoffload[solver]', or use schedule=auto"
        )


@cache
def _cp_model() -> Any:
    check_solver()
    from ortools.sat.python import cp_model  # noqa: PLC0415 - an extra

    return cp_model


class _Hinted(NamedTuple):
    """A number of the model: a variable, or a sum of one and a number, and its hint."""

    now: Any
    hint: int

    def plus(self, number: int) -> _Hinted:
        return _Hinted(self.now + number, self.hint + number)


class _HintedModel:
    """Variables with hints from 0 to a horizon, and the intervals that they make."""

    def __init__(self, horizon: int) -> None:
        self.model = _cp_model().CpModel()
        self._horizon = horizon

    def number(self, hint: int, low: int = 0) -> _Hinted:
        hint = max(low, min(hint, self._horizon))
        variable = self.model.new_int_var(low, self._horizon, "")
        self.model.add_hint(variable, hint)
        return _Hinted(variable, hint)

    def flag(self, hint: bool) -> _Hinted:
        variable = self.model.new_bool_var("")
        self.model.add_hint(variable, hint)
        return _Hinted(variable, int(hint))

    def add_and(self, one: _Hinted, other: _Hinted) -> _Hinted:
        """Add a flag that says whether two others are set."""
        flag = self.flag(bool(one.hint and other.hint))
        self.model.add_bool_and([one.now, other.now]).only_enforce_if(flag.now)
        self.model.add_bool_or([flag.now, one.now.Not(), other.now.Not()])
        return flag

    def add_and_not(self, one: _Hinted, other: _Hinted) -> _Hinted:
        """Add a flag that says whether the first of two is set, and the second is not."""
        return self.add_and(one, _Hinted(other.now.Not(), 1 - other.hint))

    def add_or(self, one: _Hinted, other: _Hinted) -> _Hinted:
        """Add a flag that says whether one of two is set."""
        flag = self.flag(bool(one.hint or other.hint))
        self.model.add_implication(one.now, flag.now)
        self.model.add_implication(other.now, flag.now)
        self.model.add_bool_or([flag.now.Not(), one.now, other.now])
        return flag

    def select(self, flag: _Hinted, this: _Hinted, that: _Hinted) -> _Hinted:
        """Add a number that equals the first of two where a flag is set, else the second."""
        chosen = self.number(this.hint if flag.hint else that.hint)
        self.model.add(chosen.now == this.now).only_enforce_if(flag.now)
        self.model.add(chosen.now == that.now).only_enforce_if(flag.now.Not())
        return chosen

    def require_not_before(
        self, later: _Hinted, earlier: _Hinted, flag: _Hinted | None = None
    ) -> None:
        """Require a number to be no less than another, always or where a flag is set."""
        rule = self.model.add(later.now >= earlier.now)
        if flag is not None:
            rule.only_enforce_if(flag.now)

    def fixed_interval(self, start: _Hinted, size: int, flag: _Hinted | None = None) -> Any:
        """Return the interval of a fixed size from a start on."""
        if flag is None:
            return self.model.new_fixed_size_interval_var(start.now, size, "")
        return self.model.new_optional_fixed_size_interval_var(start.now, size, flag.now, "")

    def interval(self, start: _Hinted, end: _Hinted, flag: _Hinted | None = None) -> Any:
        """Return the interval from a start to an end."""
        is_hinted = flag is None or flag.hint
        size = self.number(end.hint - start.hint if is_hinted else 0)
        if flag is None:
            return self.model.new_interval_var(start.now, size.now, end.now, "")
        return self.model.new_optional_interval_var(start.now, size.now, end.now, flag.now, "")


class _Copy(NamedTuple):
    """A copy that may be made.

    Attributes:
        flag: Whether it is made.
        begin: When its rank starts it; a copy back takes its memory then.
        start: When it runs.
        end: When it ends.
        interval: From start to end.
    """

    flag: _Hinted
    begin: _Hinted
    start: _Hinted
    end: _Hinted
    interval: Any


_KINDS = (Kind.F, Kind.B, Kind.W)

_Stay = tuple[Any, int]
"""An interval in which something is on a device, and its memory."""


class _ActionVariables:
    """F, B, W and the copies of one stage and microbatch.

    Attributes:
        begins: When F, B and W start.
        ends: When they end.
        may_copy: Whether anything may be copied; if not, it has none of the following.
        offload: OFFLOAD.
        reload: RELOAD, or RELOAD_B.
        queue: OFFLOAD_W.
        rest: RELOAD_W.
        in_parts: Whether the copy back is RELOAD_B, and RELOAD_W brings the rest.
    """

    def __init__(
        self,
        model: _HintedModel,
        whole: IntegerCosts,
        place: tuple[int, int],
        hint: StartTimes,
        earliest: dict[Kind, int],
        may_copy: bool,
    ) -> None:
        self._model, self._whole, self._place, self._hint = model, whole, place, hint
        self.stage, _ = place
        self.begins = {
            kind: model.number(hint.begins[self._action(kind)], low)
            for kind, low in earliest.items()
        }
        self.ends = {
            kind: begin.plus(whole.seconds[kind][self.stage]) for kind, begin in self.begins.items()
        }
        model.require_not_before(self.begins[Kind.B], self.ends[Kind.F])
        model.require_not_before(self.begins[Kind.W], self.ends[Kind.B])
        self.may_copy = may_copy
        if may_copy:
            self._add_copies()

    def _action(self, kind: Kind) -> Action:
        return Action(kind, *self._place)

    def _size_of(self, part: MemoryPart) -> int:
        return self._whole.sizes[self.stage][part]

    def _has(self, kind: Kind) -> bool:
        return kind in self._hint.kinds.get(self._place, ())

    def _add_copies(self) -> None:
        model, begins, ends = self._model, self.begins, self.ends
        away = model.flag(self._has(Kind.OFFLOAD))
        queued = model.flag(self._has(Kind.OFFLOAD_W))
        in_parts = whole_queue = model.add_and(away, queued)
        back = queued
        if self._size_of(MemoryPart.FOR_W):
            in_parts = model.add_and(away, model.flag(self._has(Kind.RELOAD_B)))
            model.model.add_implication(whole_queue.now, in_parts.now)
            back = model.add_or(in_parts, queued)
        there, here = self._whole.offload[self.stage], self._whole.reload[self.stage]
        self.in_parts = in_parts
        self.offload = self._copy(Kind.OFFLOAD, away, ends[Kind.F], (there[ACTIVATION],) * 2)
        kind = Kind.RELOAD_B if self._has(Kind.RELOAD_B) else Kind.RELOAD
        ticks = here[ACTIVATION], here[MemoryPart.FOR_B]
        self.reload = self._copy(kind, away, self.offload.end, ticks, in_parts)
        ticks = there[WAITING], there[MemoryPart.GRADIENT]
        self.queue = self._copy(Kind.OFFLOAD_W, queued, ends[Kind.B], ticks, away)
        ticks = here[MemoryPart.FOR_W], here[WAITING]
        self.rest = self._copy(Kind.RELOAD_W, back, ends[Kind.B], ticks, queued)
        # B waits only for its own part, which is copied back first.
        model.require_not_before(
            begins[Kind.B], self.reload.start.plus(here[MemoryPart.FOR_B]), away
        )
        model.require_not_before(begins[Kind.W], self.reload.end, away)
        model.require_not_before(self.rest.begin, self.queue.end, queued)
        model.require_not_before(begins[Kind.W], self.rest.end, back)

    def _copy(
        self,
        kind: Kind,
        flag: _Hinted,
        ready: _Hinted,
        ticks: tuple[int, int],
        other: _Hinted | None = None,
    ) -> _Copy:
        """Add a copy that is made where a flag is set.

        Args:
            kind: Its kind in the plan to start from.
            flag: The flag.
            ready: When it can start.
            ticks: Its ticks without and with another flag.
            other: That flag.
        """
        model, action = self._model, self._action(kind)
        start = begin = model.number(self._hint.copies.get(action, ready.hint))
        if kind in RELOADS:
            begin = model.number(self._hint.begins.get(action, start.hint))
            model.require_not_before(start, begin, flag)
        model.require_not_before(begin, ready, flag)
        less, more = ticks
        if less == more or other is None:
            return _Copy(
                flag, begin, start, start.plus(less), model.fixed_interval(start, less, flag)
            )
        end = model.number(start.hint + (more if other.hint else less))
        size = less + (more - less) * other.now
        optional = model.model.new_optional_interval_var
        return _Copy(flag, begin, start, end, optional(start.now, size, end.now, flag.now, ""))

    def copies(self) -> Iterator[tuple[bool, _Copy]]:
        """Yield all copies, and whether they go back to the device."""
        if self.may_copy:
            yield from ((False, self.offload), (True, self.reload))
            yield from ((False, self.queue), (True, self.rest))

    def busy_intervals(self) -> Iterator[Any]:
        """Yield what keeps the rank busy; what takes memory between two actions is a moment."""
        for kind, begin in self.begins.items():
            yield self._model.fixed_interval(begin, self._whole.seconds[kind][self.stage])
        for back, copy in self.copies():
            if back:
                yield self._model.fixed_interval(copy.begin, 0, copy.flag)

    def memory_intervals(self) -> Iterator[_Stay]:
        """Yield when each part is on the device."""
        model, away, queued = self._model, self.offload.flag, self.queue.flag
        start, end = self.begins[Kind.F], self.ends[Kind.W]
        for_b, for_w = self._size_of(MemoryPart.FOR_B), self._size_of(MemoryPart.FOR_W)
        gradient = self._size_of(MemoryPart.GRADIENT)
        # B changes what is there at its end, unless it adds more than it drops.
        b = (self.begins if gradient > for_b else self.ends)[Kind.B]
        if for_b:
            yield model.interval(start, model.select(away, self.offload.end, b)), for_b
            yield model.interval(self.reload.begin, b, away), for_b
        if for_w:
            kept = model.select(queued, self.queue.end, end)
            yield model.interval(start, model.select(away, self.offload.end, kept)), for_w
            whole = model.add_and_not(away, self.in_parts)
            yield model.interval(self.reload.begin, end, whole), for_w
            yield model.interval(self.rest.begin, end, self.rest.flag), for_w
        if gradient:
            yield model.interval(b, model.select(queued, self.queue.end, end)), gradient
            yield model.interval(self.rest.begin, end, queued), gradient

    def entries(self, value: Callable[[_Hinted], int]) -> Iterator[_Entry]:
        """Yield the actions of a solution."""
        for step, (kind, begin) in enumerate(self.begins.items()):
            yield _Entry(value(begin), _COMPUTE, value(self.ends[kind]), step, self._action(kind))
        if not self.may_copy:
            return
        back = Kind.RELOAD_B if value(self.in_parts) else Kind.RELOAD
        for copy, kind, saved_by, freed_by in (
            (self.offload, Kind.OFFLOAD, Kind.F, Kind.FREE),
            (self.queue, Kind.OFFLOAD_W, Kind.B, Kind.FREE_W),
        ):
            if value(copy.flag):
                ready, start = value(self.ends[saved_by]), value(copy.start)
                yield _Entry(ready, _COPY, start, 0, self._action(kind))
                yield _Entry(value(copy.end), _FREE, 0, 0, self._action(freed_by))
        for copy, kind in ((self.reload, back), (self.rest, Kind.RELOAD_W)):
            if value(copy.flag):
                start = value(copy.start)
                yield _Entry(value(copy.begin), _COPY, start, 0, self._action(kind))


# Of actions at one time: memory is freed before any is taken.
_FREE, _COPY, _COMPUTE = range(3)


class _Entry(NamedTuple):
    """An action of a rank; sorted they are in its order."""

    begin: int
    turn: int
    start: int  # of a copy; of what computes the end, so that what takes no time comes first
    step: int  # F, B, W
    action: Action


def _read_plan(
    passes: Iterable[_ActionVariables], placement: tuple[int, ...], value: Callable[[_Hinted], int]
) -> Schedule:
    """Return the plan of a solution."""
    ranks: list[list[_Entry]] = [[] for _ in range(max(placement) + 1)]
    for each in passes:
        ranks[placement[each.stage]] += each.entries(value)
    orders = ([entry.action for entry in sorted(_snap_copies_to_actions(rank))] for rank in ranks)
    return Schedule.of(orders, "optpipe")


def _snap_copies_to_actions(entries: list[_Entry]) -> Iterator[_Entry]:
    """Put each copy before the last action of its rank that starts by then.

    A rank begins no copy in the middle of an action; one that has begun waits for its lane.
    """
    begins = sorted(entry.begin for entry in entries if entry.turn == _COMPUTE)
    for entry in entries:
        before = bisect_right(begins, entry.start)
        if entry.turn == _COPY and before:
            yield entry._replace(begin=max(entry.begin, begins[before - 1]))
        else:
            yield entry


# Ranks that begin later, so that steps fit into each other, may end later, too.
_ROOM_TO_OVERLAP = 1.25

_WHOLE_UP_TO = 64  # stages times microbatches
_WINDOWS_FROM = 128
# What is left solves windows of the order, in turn.
_NOT_IN_WINDOWS = (
    *("graph_arc_lns", "graph_cst_lns", "graph_dec_lns", "graph_var_lns"),
    *("rnd_cst_lns", "rnd_var_lns", "scheduling_intervals_lns"),
)
_NUM_WORKERS = 2


class PlanModel:
    """All plans of a step that take no longer than a given plan.

    Args:
        whole: The costs of the stages, and the limit.
        costs: Which copies run at a time.
        plan: The given plan, with B and W apart.
        has_barrier: Whether a step ends when all ranks have ended it; else when each has.
    """

    def __init__(
        self, whole: IntegerCosts, costs: Costs, plan: Schedule, has_barrier: bool = True
    ) -> None:
        self._whole, self._costs = whole, costs
        self._num_microbatches, self._has_barrier = plan.num_microbatches, has_barrier
        self._hint = StartTimes.of(plan, costs, whole, has_barrier)
        room = 1.0 if has_barrier else _ROOM_TO_OVERLAP
        self._model = _HintedModel(round(self._hint.makespan * room))
        self._passes = self._make_passes()
        self._add_orders()
        self._add_lanes()
        self._add_memory()

    def _make_passes(self) -> dict[tuple[int, int], _ActionVariables]:
        whole, count = self._whole, self._num_microbatches
        first = earliest_starts(whole.seconds, whole.latencies)
        tight = [whole.may_need_copies(rank, count) for rank in range(whole.num_ranks)]
        passes = {}
        for stage, microbatch in product(range(len(whole.placement)), range(count)):
            earliest = {
                kind: round(first[kind][stage]) + microbatch * whole.seconds[kind][stage]
                for kind in _KINDS
            }
            may_copy = tight[whole.placement[stage]]
            place = stage, microbatch
            passes[place] = _ActionVariables(
                self._model, whole, place, self._hint, earliest, may_copy
            )
        return passes

    def _add_orders(self) -> None:
        """Put stages after each other, and the microbatches of a stage."""
        for (stage, microbatch), now in self._passes.items():
            if previous := self._passes.get((stage - 1, microbatch)):
                latency = self._whole.latencies[stage - 1]
                self._model.require_not_before(
                    now.begins[Kind.F], previous.ends[Kind.F].plus(latency)
                )
                self._model.require_not_before(
                    previous.begins[Kind.B], now.ends[Kind.B].plus(latency)
                )
            if before := self._passes.get((stage, microbatch - 1)):
                for kind in _KINDS:
                    self._model.require_not_before(now.begins[kind], before.ends[kind])

    def _add_lanes(self) -> None:
        lanes: defaultdict[Hashable, list[Any]] = defaultdict(list)
        for each in self._passes.values():
            rank = self._whole.placement[each.stage]
            lanes[rank] += each.busy_intervals()
            for back, copy in each.copies():
                lanes[rank, "copies", back and self._costs.copy_lanes == 2].append(copy.interval)
        for intervals in lanes.values():
            self._model.model.add_no_overlap(intervals)

    def _add_memory(self) -> None:
        of_rank: defaultdict[int, list[_Stay]] = defaultdict(list)
        for each in self._passes.values():
            if each.may_copy:
                of_rank[self._whole.placement[each.stage]] += each.memory_intervals()
        for there in of_rank.values():
            intervals, grains = zip(*there, strict=True)
            self._model.model.add_cumulative(intervals, grains, self._whole.limit)

    def solve(self, seconds: float, on_plan: Callable[[Schedule], bool]) -> bool:
        """Look for shorter plans.

        Args:
            seconds: The most that it takes.
            on_plan: Called with every plan that is shorter than all before; whether to go on.

        Returns:
            Whether nothing shorter is left to be found.
        """
        cp_model, model = _cp_model(), self._model.model
        model.minimize(self._objective(self._add_step_length()))
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = _NUM_WORKERS
        solver.parameters.use_lns_only = self._is_large
        if len(self._passes) > _WINDOWS_FROM:
            solver.parameters.ignore_subsolvers.extend(_NOT_IN_WINDOWS)
        return bool(solver.solve(model, self._listener(on_plan)) == cp_model.OPTIMAL)

    def _add_step_length(self) -> _Hinted:
        """Add what a step takes: until all ranks have ended it, or the rank that takes longest."""
        whole, count = self._whole, self._num_microbatches
        sizes = whole.placement, count
        if self._has_barrier:
            least = makespan_lower_bound(whole.seconds, whole.latencies, *sizes)
        else:
            least = max_rank_work(whole.seconds, *sizes)
        began = [self._began(rank) for rank in range(whole.num_ranks)]
        spans = (end - start.hint for end, start in zip(self._hint.ends, began, strict=True))
        step = self._model.number(max(spans), round(least))
        for (stage, microbatch), each in self._passes.items():
            if microbatch == count - 1:
                start = began[whole.placement[stage]]
                total = _Hinted(step.now + start.now, step.hint + start.hint)
                self._model.require_not_before(total, each.ends[Kind.W])
        return step

    def _began(self, rank: int) -> _Hinted:
        """Return when a rank's step begins: with its first action, unless all begin at once."""
        if self._has_barrier:
            return _Hinted(0, 0)
        first = min(stages_on(self._whole.placement, rank))
        return self._passes[first, 0].begins[Kind.F]

    @property
    def _is_large(self) -> bool:
        """Whether only parts are solved at a time."""
        return len(self._passes) > _WHOLE_UP_TO

    def _objective(self, step: _Hinted) -> Any:
        """Return what is to be small.

        A part alone seldom makes the whole shorter. So where parts are solved what ends earlier
        counts as well: it makes room for the next part.
        """
        if not self._is_large:
            return step.now
        ends = sum(each.ends[Kind.B].now for each in self._passes.values())
        return step.now * len(self._passes) + ends

    def _listener(self, on_plan: Callable[[Schedule], bool]) -> Any:
        passes, whole = self._passes, self._whole

        class Listener(_cp_model().CpSolverSolutionCallback):  # type: ignore[misc] # an extra's
            def on_solution_callback(self) -> None:
                def value(number: _Hinted) -> int:
                    return int(self.value(number.now))

                if not on_plan(_read_plan(passes.values(), whole.placement, value)):
                    self.stop_search()

        return Listener()

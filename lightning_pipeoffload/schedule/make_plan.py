"""The planner: finds the plan with the shortest period among those that fit.

Plans that cannot become the fastest are skipped. Copies make no order faster, so an order gets
copies only if it would be the fastest without them. A builder that searches for seconds is tried
last, and only if its lower bound is below the best period.

Several processes may share the work: each calls :func:`make_plan` with the same request, plans a
part of the options, and gets the figures of all. What is skipped is decided by what was found in
earlier phases, which are the same for any number of processes; so is the plan::

    bounds | orders: the best bound, the next 3, the next 9, ... | orders with copies of their own
           | copies: the fastest without them, the next 3, ... | searches | postponed W's
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from operator import sub
from typing import Any, NamedTuple

from .actions import MemoryLimitError, ScheduleError
from .candidates import (
    RECOMPUTATIONS,
    Candidate,
    PlanOption,
    best_candidate,
    period_with_copy_penalty,
)
from .costs import Costs
from .families import FAMILIES, Recipe, build_from_recipe
from .passes.last_weights import postpone_weight_gradients
from .passes.offload import OffloadReport, offload_activations
from .passes.transfer import as_executed, split_every_backward, split_fused_backward
from .rank_limits import RankLimits
from .schedule import Schedule, device_indices
from .search.problem import ROUNDING
from .simulation.simulate import optimizer_step_seconds, period_bubble, simulate, steady_period
from .solver.plan_problem import (
    copy_seconds_lower_bound,
    makespan_lower_bound,
    max_rank_work,
    memory_limited_lower_bound,
    span_lower_bound,
)
from .text import bytes_text, share_text

# A builder that searches for seconds must promise to gain this share of the best plan's period.
_WORTH_SEARCHING = 0.02
# Each phase plans so many times as many options as the one before, which may show that the others
# are slower.
_GROWTH = 3
# Plans whose W's are postponed: those that are fastest but for the optimizer's step.
_NUM_POSTPONED = 3


Job = tuple[int, Callable[[], Any]]
"""The option's index in the request, which decides the process that runs it, and the function to
run.
"""

Share = Callable[[Sequence[Job], Callable[[Any], Any]], list[Any]]
"""Runs each job on one process and returns all results in order; results of other processes come
reduced by the second argument, which drops schedules.
"""


def run_jobs_here(jobs: Sequence[Job], drop_schedules: Callable[[Any], Any]) -> list[Any]:
    """Do all jobs on this process."""
    return [run() for _, run in jobs]


class HostMemoryLimitError(ScheduleError):
    """A plan offloads more than fits into a rank's host memory."""


@dataclass(frozen=True)
class PlanRequest:
    """The options to plan, and their limits.

    Attributes:
        num_ranks: Ranks of the pipeline.
        options: The options to choose among; a single one is planned or refused with its own error.
        costs_of: Returns the costs of an option's stages; it may raise ScheduleError.
        memory_limit: The most memory of a rank, in the unit of the costs, or of the device at each
            place of the pipeline (:func:`.device_indices`); None: any.
        offload: "auto": as little as the memory limit requires; "none"; or a share of the
            activations, as in :func:`offload_activations`.
        memory_without_activations: Returns the memory of an option's weights, which is subtracted
            from the limit; or a sequence with what is subtracted on each rank, where ranks differ.
        device_names: The device at each place, for refusals; (): they are numbered.
        has_barrier: Returns whether all ranks must end a step of an option before any rank begins
            the next one.
        steps_early: Whether an optimizer on the host steps as gradients become final. Then W's are
            postponed to overlap with these steps, as far as memory allows.
        describe_host_shortage: Returns why a schedule's offload exceeds host memory; "" if it does
            not.
        must_fit: Whether an option that does not fit is refused. If not, a single option gets the
            plan that offloads the most.
        searches_always: Whether to run builders that search for seconds even if their lower bound
            is not below the best period.
        omits_above: Skip options that must take longer than this period, or than the best plan of
            earlier phases; these are never chosen. None: plan all options, for a table.
        format_memory: Formats memory in refusals.
        show: Called with what is being done, as "planning 3 of 60".
        share: Divides the work among the processes that make this plan.
        recipes: The recipe of each schedule, by its name.
        builder_options: Other options of the builders.
    """

    num_ranks: int
    options: Sequence[PlanOption]
    costs_of: Callable[[PlanOption], Costs]
    memory_limit: float | Sequence[float] | None = None
    offload: str | float = "auto"
    memory_without_activations: Callable[[PlanOption], float | Sequence[float]] = lambda option: 0.0
    device_names: Sequence[str] = ()
    has_barrier: Callable[[PlanOption], bool] = lambda option: False
    steps_early: bool = False
    describe_host_shortage: Callable[[Schedule, Costs], str] = lambda schedule, costs: ""
    must_fit: bool = True
    searches_always: bool = False
    omits_above: float | None = None
    format_memory: Callable[[float], str] = bytes_text
    show: Callable[[str], None] = lambda text: None
    share: Share = run_jobs_here
    recipes: Mapping[str, Recipe] = field(default_factory=lambda: FAMILIES)
    builder_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = self.memory_limit
        if isinstance(limits, Sequence) and len({*limits}) == 1:
            object.__setattr__(self, "memory_limit", limits[0])

    def placement_of(self, option: PlanOption) -> tuple[int, ...]:
        """Return the rank of every stage."""
        return self.recipes[option.schedule].placement(self.num_ranks, option.num_chunks)

    def activation_limits(self, option: PlanOption) -> RankLimits | None:
        """Return the most memory for an option's activations on each rank; None: any."""
        if self.memory_limit is None:
            return None
        placement, memory = self.placement_of(option), self.memory_without_activations(option)
        places = device_indices(placement)  # a schedule from a file has ranks of its own
        left = map(sub, _by_rank(self.memory_limit, places), _by_rank(memory, range(len(places))))
        return RankLimits((*(max(0.0, each) for each in left),), placement)


def _by_rank(value: float | Sequence[float], places: Sequence[int]) -> list[float]:
    return [value[place] if isinstance(value, Sequence) else value for place in places]


@dataclass(frozen=True)
class Plan:
    """The fastest plan within the limits.

    Attributes:
        best: The plan with its figures.
        schedule: Its schedule.
        costs: The costs that it was made for.
        candidates: All candidates in the order of the request; each but the best has the reason why
            it was not chosen.
    """

    best: Candidate
    schedule: Schedule
    costs: Costs
    candidates: Sequence[Candidate]

    @property
    def report(self) -> OffloadReport | None:
        """The report on the plan's offload, if one was planned."""
        return self.best.report

    @property
    def is_limited_by_memory(self) -> bool:
        """Whether the memory limit excluded a plan, or made one copy, with offload "auto"."""
        return any(
            each.needs_more_memory or (each.fits and each.offload in ("auto", "paged"))
            for each in self.candidates
        )

    @property
    def without_candidate_schedules(self) -> Plan:
        """The plan without the schedules of the other candidates, for sending to other ranks."""
        return replace(
            self, candidates=[candidate.without_schedule for candidate in self.candidates]
        )


def make_plan(request: PlanRequest) -> Plan:
    """Plan every option of a request, and choose the fastest plan within the limits.

    Raises:
        MemoryLimitError: No plan fits the memory limit; the message has the least possible limit.
        ScheduleError: No plan can be made at all.
    """
    trials = _Trials(request)
    trials.find_bounds()
    slow = [o for o in request.options if request.recipes[o.schedule].takes_seconds]
    is_searched = request.searches_always or len(request.options) == 1
    quick = [option for option in request.options if option not in slow or is_searched]
    copying = [option for option in quick if request.recipes[option.schedule].order]
    trials.try_orders([option for option in quick if option not in copying])
    trials.try_orders(copying)
    trials.try_copies([option for option in quick if not trials.is_bound_too_slow(option)])
    for option in slow:
        if option not in quick and trials.is_worth_searching(option):
            trials.try_orders([option])
    trials.try_postponed_weight_grads()
    best = trials.best() or trials.full_offload_plan()
    if best is None or best.schedule is None:
        raise trials.no_plan_error()
    place = {option: index for index, option in enumerate(request.options)}
    candidates = sorted(trials.candidates, key=lambda candidate: place[candidate.option])
    judged = [candidate.with_rejection_reason(best) for candidate in candidates]
    return Plan(best, best.schedule, trials.actual_costs(best.option), judged)


def score_bound_without_copies(request: PlanRequest) -> float:
    """Return a lower bound on the scores of all plans without copies; infinite if none can be."""
    trials = _Trials(request)
    trials.find_bounds()
    return trials.least_order_bound


_ORDERS, _COPIED = ("none", "its own"), ("auto", "paged")
_MANY_TIMES = 1e6


def _saving(option: PlanOption) -> tuple[int, int, bool]:
    """Return numbers of which each saves memory where it is larger."""
    recompute = RECOMPUTATIONS.index(option.recompute)
    return option.num_microbatches, recompute, option.head_weight_grad == "B"


def _order_of(option: PlanOption) -> tuple[Any, ...]:
    return option.schedule, option.num_chunks, option.num_sequence_slices, option.num_kept


class _Bound(NamedTuple):
    """Seconds that an option takes at least: its work, its order, and the order with copies."""

    work: float = 0.0
    order: float = 0.0
    copies: float = 0.0


class _Trials:
    """Plans the candidates of a request."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._costs: dict[Any, Costs] = {}
        self._limits: dict[Any, RankLimits | None] = {}
        self._counted: dict[Any, Costs] = {}
        self._places = {option: place for place, option in enumerate(request.options)}
        self._bounds: dict[PlanOption, _Bound] = {}
        self._free_orders: dict[PlanOption, Schedule] = {}
        self._free_periods: dict[PlanOption, float] = {}  # of orders that others give their copies
        self._error = ScheduleError("no plan can be made: there are no blocks for any")
        self.candidates: list[Candidate] = []
        self._new: list[Candidate] = []  # of the job that runs
        self._by_order: defaultdict[Any, list[Candidate]] = defaultdict(list)
        self._num_grouped = 0  # candidates that are in the groups by order

    def actual_costs(self, option: PlanOption) -> Costs:
        """Return the costs of an option's stages."""
        key = self._cost_key(option)
        if key not in self._costs:
            self._costs[key] = self._request.costs_of(option)
        return self._costs[key]

    def scaled_costs(self, option: PlanOption) -> Costs:
        """Return the costs to plan by, in which all ranks have the same limit."""
        key = self._cost_key(option)
        if key not in self._counted:
            costs, limits = self.actual_costs(option), self._rank_limits(option)
            self._counted[key] = costs if limits is None else limits.scale_to_common_limit(costs)
        return self._counted[key]

    def _cost_key(self, option: PlanOption) -> tuple[Any, ...]:
        """Return that of an option by which its stages' costs and weights follow."""
        computed = option.recompute, option.head_weight_grad
        counts = option.num_microbatches, option.num_sequence_slices
        return self._request.placement_of(option), *counts, *computed, option.num_kept

    def _rank_limits(self, option: PlanOption) -> RankLimits | None:
        key = self._cost_key(option)
        if key not in self._limits:
            self._limits[key] = self._request.activation_limits(option)
        return self._limits[key]

    def limit(self, option: PlanOption) -> float | None:
        """Return the most memory for an option's activations on a rank, as costs count it."""
        limits = self._rank_limits(option)
        return None if limits is None else limits.common_limit

    def _actual_peak(self, option: PlanOption, peaks: Sequence[float]) -> float:
        """Return the largest memory of a rank."""
        limits = self._rank_limits(option)
        return (
            max(peaks)
            if limits is None
            else max(map(limits.actual_memory, range(len(peaks)), peaks))
        )

    def _build(self, option: PlanOption, limit: float | None) -> Schedule:
        request, name = self._request, option.schedule
        sizes = request.num_ranks, option.num_microbatches, option.num_chunks
        costs, recipe = self.scaled_costs(option), request.recipes[name]
        options = {"num_sequence_slices": option.num_sequence_slices, **request.builder_options}
        return build_from_recipe(recipe, name, sizes, costs, limit, **options)

    def _collect_candidates(
        self, jobs: Sequence[tuple[PlanOption, Callable[[PlanOption], None]]]
    ) -> None:
        """Do what may add candidates, and add those of all processes."""

        def run(option: PlanOption, job: Callable[[PlanOption], None]) -> list[Candidate]:
            num_done = len({candidate.option for candidate in self.candidates})
            num_options = len(self._request.options)
            self._request.show(f"planning {min(num_done + 1, num_options)} of {num_options}")
            self._new = []
            job(option)
            return self._new

        shared = [(self._places[option], partial(run, option, job)) for option, job in jobs]
        for added in self._request.share(
            shared, lambda new: [each.without_schedule for each in new]
        ):
            self.candidates += added

    def _map_over_processes(
        self, question: Callable[[PlanOption], Any], options: Sequence[PlanOption]
    ) -> list[Any]:
        """Return an answer for each option, which one process finds."""
        jobs = [(self._places[option], partial(question, option)) for option in options]
        return self._request.share(jobs, lambda answer: answer)

    def find_bounds(self) -> None:
        """Find a lower bound on the period of each option."""
        wanted = self._request.options
        self._bounds = dict(zip(wanted, self._map_over_processes(self._bound, wanted), strict=True))

    @property
    def least_order_bound(self) -> float:
        """The smallest bound of an order without copies."""
        return min((bound.order for bound in self._bounds.values() if bound.order), default=inf)

    def try_orders(self, options: Sequence[PlanOption]) -> None:
        """Plan the orders of options, those with the best bounds first."""
        for phase in _growing_batches(self._sort_by_bound(options, "order")):
            self._collect_candidates([(option, self._try_unless_slower) for option in phase])

    def _try_order(self, option: PlanOption) -> None:
        """Plan an option without copies, or with the requested share of offload."""
        share = self._request.offload
        try:
            if share in ("auto", "none"):
                self._add_order(option)
            else:
                self._add_share(option, share)
        except ScheduleError as error:
            self._add_refused_candidate(option, "none" if share == "auto" else str(share), error)

    def _add_order(self, option: PlanOption) -> None:
        schedule = self._build(option, self.limit(option))
        is_alone = len(self._request.options) == 1  # asked for by its name, its copies with it
        if schedule.has_copies and self._request.offload == "none" and not is_alone:
            raise ScheduleError("it copies, and offload is none")
        self._add_candidate(option, "its own" if schedule.has_copies else "none", schedule)

    def _add_share(self, option: PlanOption, share: str | float) -> None:
        free, limit = self._build(option, None), self.limit(option)
        if self._may_omit(self._simulate_plan(option, free)[0]):
            raise ScheduleError("even without its copies no faster than the best")
        planned = offload_activations(free, self.scaled_costs(option), share, limit)
        self._add_candidate(option, str(share) if planned[0].has_copies else "none", *planned)

    def try_copies(self, tried: Sequence[PlanOption]) -> None:
        """Plan copies for options that may become the fastest, the most promising first."""
        if self._request.memory_limit is None or self._request.offload != "auto":
            return
        for phase in _growing_batches(self._sort_by_bound(tried, "copies")):
            wanted = [
                o
                for o in phase
                if not (self.is_bound_too_slow(o) or self._is_dominated(o, _COPIED))
            ]
            seconds = dict(
                zip(wanted, self._map_over_processes(self._bound_with_copies, wanted), strict=True)
            )
            may_copy = [option for option in wanted if seconds[option] is not None]
            for part in _growing_batches(sorted(may_copy, key=lambda option: seconds[option])):
                self._collect_candidates(
                    [(o, partial(self._try_to_copy, seconds=seconds[o])) for o in part]
                )

    def _bound_with_copies(self, option: PlanOption) -> float | None:
        """Return a bound on the period of an option's order with copies; None if it needs none."""
        if self._request.recipes[option.schedule].order:  # it has its own
            return None
        try:
            schedule = self._build(option, None)
        except ScheduleError:
            return None  # its order has been refused for that already
        is_planned = any(c.option == option and c.schedule == schedule for c in self.candidates)
        if is_planned or schedule.has_copies:
            return None
        self._free_orders[option] = schedule
        copying, limit = 0.0, self.limit(option)
        if limit is not None and option.num_sequence_slices == 1:
            copying = copy_seconds_lower_bound(schedule, self.scaled_costs(option), limit)
            if self._may_omit(period_with_copy_penalty(copying, copies=True)):
                return copying
        return max(copying, self._simulate_plan(option, schedule)[0])

    def _try_to_copy(self, option: PlanOption, seconds: float) -> None:
        best, schedule = best_candidate(self.candidates), self._free_orders[option]
        try:
            if best is not None and Candidate(option, "auto", "", seconds).score >= best.score:
                raise ScheduleError("with the copies that it needs no faster than the best")
            planned = self._offload(option, schedule, "auto", self.limit(option))
            self._add_candidate(option, "paged" if planned[1].is_paged else "auto", *planned)
        except ScheduleError as error:
            self._add_refused_candidate(option, "auto", error)

    def _offload(
        self, option: PlanOption, schedule: Schedule, amount: str, limit: float | None
    ) -> tuple[Schedule, OffloadReport]:
        actual_costs = self.actual_costs(option)

        def has_room(offloaded: Schedule) -> bool:
            return not self._request.describe_host_shortage(offloaded, actual_costs)

        apart = split_every_backward(schedule)
        return offload_activations(apart, self.scaled_costs(option), amount, limit, has_room)

    def try_postponed_weight_grads(self) -> None:
        """Postpone W's of the most promising plans, to overlap with an optimizer on the host."""
        planned = [c.option for c in self.candidates if c.fits and c.offload == "none"]
        early = planned if self._request.steps_early else []
        seconds = dict(
            zip(early, self._map_over_processes(self._period_without_step, early), strict=True)
        )
        promising = sorted(early, key=lambda option: seconds[option])[:_NUM_POSTPONED]
        self._collect_candidates([(option, self._add_postponed_candidates) for option in promising])

    def _add_postponed_candidates(self, option: PlanOption) -> None:
        num_ranks = self._request.num_ranks
        counts = sorted({num_ranks * quarter // 4 for quarter in range(5)})
        apart = split_every_backward(self._find_plan_without_copies(option))
        for count in (
            counts if any(optimizer_step_seconds(apart, self.scaled_costs(option))) else ()
        ):
            with suppress(MemoryLimitError):  # what more of them need as well
                postponed = postpone_weight_gradients(apart, count)
                self._add_candidate(option, "none", postponed, postponed=count)

    def _period_without_step(self, option: PlanOption) -> float:
        plan = split_fused_backward(self._find_plan_without_copies(option))
        costs = self.scaled_costs(option)
        return steady_period(plan, replace(costs, step=0.0), self._request.has_barrier(option))

    def _find_plan_without_copies(self, option: PlanOption) -> Schedule:
        """Return the plan without copies that this process has found for an option."""
        schedules = (
            c.schedule for c in self.candidates if c.option == option and c.offload == "none"
        )
        return next(schedule for schedule in schedules if schedule is not None)

    def best(self) -> Candidate | None:
        """Return the best plan, with its schedule on every process; None if none fits."""
        best = best_candidate(sorted(self.candidates, key=lambda each: self._places[each.option]))
        if best is None:
            return None
        place = self.candidates.index(best)
        answers = self._map_over_processes(
            lambda option: (best.schedule, best.report), [best.option]
        )
        schedule, report = answers[0]
        limits = self._rank_limits(best.option)
        if report is not None and limits is not None:
            peaks = (*map(limits.actual_memory, range(len(limits.limits)), report.peak_memory),)
            report = replace(report, peak_memory=peaks)
        self.candidates[place] = replace(best, schedule=schedule, report=report)
        return self.candidates[place]

    def full_offload_plan(self) -> Candidate | None:
        """Return the plan that offloads the most; None if plans have to fit."""
        request = self._request
        if request.must_fit or len(request.options) > 1 or self._least_sufficient_limit == inf:
            return None
        option = request.options[0]
        planned = self._offload(option, self._build(option, None), "full", None)
        period, bubble, peaks, makespan = self._simulate_plan(option, planned[0])
        figures = period, bubble, self._actual_peak(option, peaks), makespan
        return Candidate(option, "full", "", *figures, *planned)

    def _add_candidate(
        self,
        option: PlanOption,
        offload: str,
        schedule: Schedule,
        report: OffloadReport | None = None,
        postponed: int = 0,
    ) -> None:
        costs = self.actual_costs(option)
        shortage = schedule.has_copies and self._request.describe_host_shortage(schedule, costs)
        if shortage:
            raise HostMemoryLimitError(shortage)
        period, bubble, peaks, makespan = self._simulate_plan(option, schedule)
        limit, needed = self.limit(option), max(peaks)
        # B may leave more than F did, so a plan that fits as it is built may not as it runs.
        if limit is not None and needed > limit * (1 + ROUNDING):
            sentence = f"{{limit}} is less than the {{needed}} that {option.schedule} needs"
            raise MemoryLimitError(sentence, limit, needed)
        figures = period, bubble, self._actual_peak(option, peaks), makespan
        self._new.append(Candidate(option, offload, "", *figures, schedule, report, postponed))

    def _simulate_plan(
        self, option: PlanOption, schedule: Schedule
    ) -> tuple[float, float, Sequence[float], float]:
        """Return period, bubble, ranks' memory and makespan of a schedule as it is executed."""
        costs = self.scaled_costs(option)
        early = self._request.steps_early
        plan = as_executed(schedule, costs, early)
        timeline = simulate(plan, costs)
        period = steady_period(plan, costs, self._request.has_barrier(option))
        bubble = period_bubble(timeline, period)
        return period, bubble, timeline.peak_memory, timeline.makespan

    def _add_refused_candidate(
        self, option: PlanOption, offload: str, error: ScheduleError
    ) -> None:
        self._error = error
        if isinstance(error, MemoryLimitError):
            needed = self._actual_need(option, error)
            refused = Candidate(option, offload, "needs more memory", peak_memory=needed)
        elif isinstance(error, HostMemoryLimitError):
            refused = Candidate(option, offload, "the hosts have no room for what it offloads")
        else:
            refused = Candidate(option, offload, str(error).partition("\n")[0])
        self._new.append(refused)

    @property
    def _least_sufficient_limit(self) -> float:
        """The smallest limit that a refused option keeps."""
        refused = [each for each in self.candidates if each.needs_more_memory]
        needs = (self._needed_limit(each.option, each.peak_memory or 0.0) for each in refused)
        return min((needed for needed, _, _ in needs), default=inf)

    def _needed_limit(self, option: PlanOption, needed: float) -> tuple[float, float, str]:
        """Return the limit that activations of such a size need, that which is given, and a name.

        Where ranks have limits of their own, both are those of the rank that has least in
        proportion, which is named; else the name is "".
        """
        request, limits = self._request, self._rank_limits(option)
        assert request.memory_limit is not None
        assert limits is not None
        memory = request.memory_without_activations(option)
        if not isinstance(memory, Sequence) and not isinstance(request.memory_limit, Sequence):
            return needed + memory, request.memory_limit, ""
        rank = limits.tightest(self.actual_costs(option))
        return needed, limits.limits[rank], limits.name_rank(rank, request.device_names)

    def is_worth_searching(self, option: PlanOption) -> bool:
        """Return whether a search may gain enough; if not, record the reason."""
        request, best, why = self._request, best_candidate(self.candidates), ""
        promised = inf if best is None else best.score / (self._bounds[option].order or inf) - 1
        if request.memory_limit is None:
            why = "it is for tight limits, and there is none"
        elif not request.recipes[option.schedule].respects_memory_limit:
            why = "v is the same search, with more memory"
        elif promised <= _WORTH_SEARCHING:
            gain = share_text(max(0.0, promised))
            why = f"the best plan is within {gain} of the least possible time"
        if why:
            self.candidates.append(Candidate(option, "none", f"not searched for: {why}"))
        return not why

    def is_bound_too_slow(self, option: PlanOption) -> bool:
        """Return whether the bound of an option shows that it is slower than the best."""
        return self._may_omit(period_with_copy_penalty(self._bounds[option].copies, copies=True))

    def _sort_by_bound(self, options: Sequence[PlanOption], bound: str) -> list[PlanOption]:
        """Return options with the best bounds first; of about equal ones those of least memory."""
        least = min((getattr(self._bounds[option], bound) for option in options), default=0.0)

        def key(option: PlanOption) -> tuple[float, Any]:
            times = getattr(self._bounds[option], bound) / (least or 1.0)
            return round(min(times, _MANY_TIMES), 2), [-rank for rank in _saving(option)]

        return sorted(options, key=key)

    def _is_dominated(self, option: PlanOption, offloads: Sequence[str]) -> bool:
        """Whether an option that needs less memory shows that this is slower than the best.

        It has the same order, for more microbatches or with more recomputed: it did not fit, or
        has as much work and took longer than the best.
        """
        if self._request.omits_above is None:
            return False
        for candidate in self._of_same_order(option):
            other = candidate.option
            if other == option or candidate.offload not in offloads:
                continue
            saved = zip(_saving(other), _saving(option), strict=True)
            if all(more >= less for more, less in saved):
                is_less_work = self._bounds[other].work <= self._bounds[option].work * (
                    1 + ROUNDING
                )
                is_above = candidate.fits and is_less_work and self._may_omit(candidate.score)
                if is_above or candidate.needs_more_memory:
                    return True
        return False

    def _of_same_order(self, option: PlanOption) -> list[Candidate]:
        """Return the candidates that differ from an option only in what :func:`_saving` counts."""
        for candidate in self.candidates[self._num_grouped :]:
            self._by_order[_order_of(candidate.option)].append(candidate)
        self._num_grouped = len(self.candidates)
        return self._by_order[_order_of(option)]

    def _may_omit(self, bound: float) -> bool:
        if self._request.omits_above is None:
            return False
        best = best_candidate(self.candidates)
        above = self._request.omits_above if best is None else best.score
        return bound > min(above, self._request.omits_above) * (1 + _WORTH_SEARCHING)

    def _try_unless_slower(self, option: PlanOption) -> None:
        is_slower = self._may_omit(self._bounds[option].order) or self._is_dominated(
            option, _ORDERS
        )
        if is_slower or self._may_omit(self._bound_of_own_copies(option)):
            self._add_refused_candidate(
                option, "none", ScheduleError("nothing of it is faster than the best")
            )
        else:
            self._try_order(option)

    def _bound_of_own_copies(self, option: PlanOption) -> float:
        """Return a lower bound on the score of an option that copies of its own accord; else 0."""
        order = self._request.recipes[option.schedule].order
        if not order or self._request.omits_above is None:
            return 0.0
        free = replace(option, schedule=order)
        if free not in self._free_periods:
            try:
                self._free_periods[free] = self._simulate_plan(free, self._build(free, None))[0]
            except ScheduleError:
                self._free_periods[free] = 0.0
        return period_with_copy_penalty(self._free_periods[free], copies=True)

    def _bound(self, option: PlanOption) -> _Bound:
        """Return lower bounds on the period of an option; 0 if its stages are unknown."""
        try:
            costs = self.scaled_costs(option)
        except ScheduleError:
            return _Bound()
        request, placement = self._request, self._request.placement_of(option)
        seconds, latencies = costs.seconds_by_kind(len(placement)), costs.latencies(placement)
        if option.num_sequence_slices > 1:  # a rank begins sooner: its work alone is the bound
            work = max_rank_work(seconds, placement, option.num_microbatches)
            return _Bound(work, work, work)
        sizes = seconds, latencies, placement, option.num_microbatches
        if request.has_barrier(option):
            work = makespan_lower_bound(*sizes)
        else:
            work = max_rank_work(seconds, placement, option.num_microbatches)
        least, limit = max(work, span_lower_bound(*sizes)), self.limit(option)
        if limit is None:
            return _Bound(work, least, least)
        arguments = costs, placement, option.num_microbatches, limit
        copies = max(least, memory_limited_lower_bound(*arguments, copies=True))
        may_stay = (
            request.offload in ("auto", "none") and not request.recipes[option.schedule].order
        )
        order = (
            max(least, memory_limited_lower_bound(*arguments, copies=False)) if may_stay else copies
        )
        return _Bound(work, order, copies)

    def no_plan_error(self) -> ScheduleError:
        """Return an error with the reason why there is no plan."""
        has_limit = self._request.memory_limit is not None
        if not self.candidates or len(self._request.options) == 1:
            if not has_limit or not isinstance(self._error, MemoryLimitError):
                return self._error
            sentence, option = self._error.args[0], self._request.options[0]
            needs = self._needed_limit(option, self._actual_need(option, self._error))
        elif not has_limit or self._least_sufficient_limit == inf:
            return ScheduleError(f"no plan can be made: {self.candidates[0].reason}")
        else:
            count = len(self.candidates)
            sentence = f"{{limit}} is less than any of {count} plans needs; use at least {{needed}}"
            refused = [each for each in self.candidates if each.needs_more_memory]
            found = [self._needed_limit(each.option, each.peak_memory or 0.0) for each in refused]
            needs = min(found, key=lambda each: each[0] / each[1] if each[1] else inf)
        needed, limit, rank = needs
        if rank:
            sentence = sentence.replace("{limit}", f"{{limit}} of {rank}", 1)
        return MemoryLimitError(sentence, limit, needed)

    def _actual_need(self, option: PlanOption, error: MemoryLimitError) -> float:
        """Return what the tightest rank needs, of what an option needs as costs count it."""
        needed, limits = error.args[2], self._rank_limits(option)
        if limits is None:
            return float(needed)
        return limits.actual_memory(limits.tightest(self.actual_costs(option)), needed)


def _growing_batches(options: Sequence[PlanOption]) -> Iterator[Sequence[PlanOption]]:
    start, size = 0, 1
    while start < len(options):
        yield options[start : start + size]
        start, size = start + size, size * _GROWTH

"""Chooses among all families, cuts and offloads by the time from one step to the next.

What cannot become the fastest is not worked out: copies make no order faster, so where it takes as
long without them as the best plan that fits, none are planned; a builder that searches for seconds
is asked last, and only where a lower bound says that there is something to gain. The V-schedules of
less memory are not asked: ``v`` is their search, in all of the memory that there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

from .actions import MemoryLimitError, ScheduleError
from .candidates import Candidate, Choice, Option, best_of
from .costs import Costs
from .families import FAMILIES
from .lower_bound import earliest_end, most_work
from .passes.offload import OffloadReport, offload_activations
from .passes.reduce import add_reductions
from .passes.transfer import split_every_backward, split_fused_backward
from .recipe import build_by
from .schedule import Schedule
from .search.problem import ROUNDING
from .simulation.simulate import simulate
from .simulation.steady_step import period_bubble, steady_period

__all__ = ["Limits", "evaluate"]

CostsOf = Callable[[Option], Costs]

# What a search for seconds must promise to gain.
_WORTH_SEARCHING = 0.02


def _anything(schedule: Schedule, costs: Costs) -> bool:
    return True


def _nothing(option: Option) -> float:
    return 0.0


def _never(option: Option) -> bool:
    return False


class Limits(NamedTuple):
    """What a plan has to keep.

    Attributes:
        memory: The most memory of a rank, in the unit of the costs; None: any.
        offload: "auto": as little as the memory asks for; "none", or a share of the activations, as
            for :func:`offload_activations`.
        has_room: Whether the hosts have room for what a schedule offloads.
        taken: What of the memory an option's plans cannot have, for its weights are there.
    """

    memory: float | None = None
    offload: str | float = "auto"
    has_room: Callable[[Schedule, Costs], bool] = _anything
    taken: Callable[[Option], float] = _nothing

    def left(self, option: Option) -> float | None:
        """Return the most memory of a rank for an option's plans."""
        return None if self.memory is None else max(0.0, self.memory - self.taken(option))


_NO_LIMITS = Limits()


def evaluate(
    wanted: Sequence[Option],
    num_ranks: int,
    costs_of: CostsOf,
    limits: Limits = _NO_LIMITS,
    *,
    has_barrier: Callable[[Option], bool] = _never,
    always_search: bool = False,
) -> Choice:
    """Plan every option, and choose the fastest plan that keeps the limits.

    Args:
        wanted: What to make plans of.
        num_ranks: Ranks of the pipeline.
        costs_of: Returns what the stages of an option cost; it may raise ScheduleError.
        limits: What the plans have to keep.
        has_barrier: Returns whether no rank begins a step of an option before all have ended the
            one before.
        always_search: Search for seconds also where that promises nothing.

    Raises:
        MemoryLimitError: None does; the message has the least that would do.
        ScheduleError: No plan can be made at all.
    """
    trials = _Trials(num_ranks, costs_of, limits, has_barrier)
    slow = [option for option in wanted if FAMILIES[option.schedule].takes_seconds]
    quick = [option for option in wanted if option not in slow]
    for option in quick:
        trials.try_order(option)
    trials.try_copies(quick)
    for option in slow:
        if always_search or trials.may_gain(option):
            trials.try_order(option)
    best = best_of(trials.found)
    if best is None:
        raise trials.no_plan()
    place = {option: index for index, option in enumerate(wanted)}
    found = sorted(trials.found, key=lambda candidate: place[candidate.option])
    return Choice(best, [candidate.judged(best) for candidate in found])


class _Trials:
    """Candidates, as they are planned.

    Attributes:
        found: Those so far.
    """

    def __init__(
        self,
        num_ranks: int,
        costs_of: CostsOf,
        limits: Limits,
        has_barrier: Callable[[Option], bool],
    ) -> None:
        self._num_ranks = num_ranks
        self._costs_of = costs_of
        self._limits = limits
        self._has_barrier = has_barrier
        self._known: dict[Any, Costs] = {}
        self._least = inf
        self.found: list[Candidate] = []

    def _costs(self, option: Option) -> Costs:
        placement = option.placement(self._num_ranks)
        key = placement, option.num_microbatches, option.recompute
        if key not in self._known:
            self._known[key] = self._costs_of(option)
        return self._known[key]

    def _build(self, option: Option, limit: float | None) -> Schedule:
        sizes = self._num_ranks, option.num_microbatches, option.num_chunks
        name, costs = option.schedule, self._costs(option)
        return build_by(FAMILIES[name], name, sizes, costs, limit)

    def try_order(self, option: Option) -> None:
        """Plan an option by its order alone, or with the share of offload that is asked for."""
        share = self._limits.offload
        try:
            if share in ("auto", "none"):
                self._add_order(option)
            else:
                self._add_share(option, share)
        except ScheduleError as error:
            self._refuse(option, "none" if share == "auto" else str(share), error)

    def _add_order(self, option: Option) -> None:
        schedule = self._build(option, self._limits.left(option))
        if schedule.has_copies and self._limits.offload == "none":
            raise ScheduleError("it copies, and offload is none")
        self._add(option, "its own" if schedule.has_copies else "none", schedule)

    def _add_share(self, option: Option, share: str | float) -> None:
        free = self._build(option, None)
        limit = self._limits.left(option)
        planned = offload_activations(free, self._costs(option), share, limit)
        self._add(option, str(share), *planned)

    def try_copies(self, tried: Iterable[Option]) -> None:
        """Plan copies for options that may so become the fastest, the most hopeful first."""
        if self._limits.memory is None or self._limits.offload != "auto":
            return
        free = filter(None, map(self._free, tried))
        for seconds, option, schedule in sorted(free, key=lambda found: found[0]):
            self._try_to_copy(option, schedule, seconds)

    def _free(self, option: Option) -> tuple[float, Option, Schedule] | None:
        """Return an option as it is without a limit; None where copies make no sense."""
        try:
            schedule = self._build(option, None)
        except ScheduleError:
            return None  # which its order has been refused for
        is_there = any(c.option == option and c.schedule == schedule for c in self.found)
        if is_there or schedule.has_copies:
            return None
        return self._figures(option, schedule)[0], option, schedule

    def _try_to_copy(self, option: Option, schedule: Schedule, seconds: float) -> None:
        best = best_of(self.found)
        try:
            if best is not None and Candidate(option, "auto", "", seconds).score >= best.score:
                raise ScheduleError("even without its copies no faster than the best")
            costs, limit = self._costs(option), self._limits.left(option)

            def is_there_room(offloaded: Schedule) -> bool:
                return self._limits.has_room(offloaded, costs)

            runs = split_every_backward(schedule)
            planned = offload_activations(runs, costs, "auto", limit, is_there_room)
            self._add(option, "paged" if planned[1].is_paged else "auto", *planned)
        except ScheduleError as error:
            self._refuse(option, "auto", error)

    def _add(
        self, option: Option, offload: str, schedule: Schedule, report: OffloadReport | None = None
    ) -> None:
        costs = self._costs(option)
        if schedule.has_copies and not self._limits.has_room(schedule, costs):
            raise ScheduleError("the hosts have no room for what it offloads")
        figures = self._figures(option, schedule)
        self._check_memory(option, figures[2])
        self.found.append(Candidate(option, offload, "", *figures, schedule, report))

    def _check_memory(self, option: Option, needed: float) -> None:
        """Refuse what fits as it is built, but not as it runs: B may leave more than F did."""
        limit = self._limits.left(option)
        if limit is not None and needed > limit * (1 + ROUNDING):
            sentence = f"{{limit}} is less than the {{needed}} that {option.schedule} needs"
            raise MemoryLimitError(sentence, limit, needed)

    def _figures(self, option: Option, schedule: Schedule) -> tuple[float, float, float, float]:
        """Return period, bubble, memory and makespan of a schedule, as it runs."""
        costs, plan = self._costs(option), split_fused_backward(schedule)
        if any(costs.per_stage("reduce", plan.num_stages)):
            plan = add_reductions(plan)
        timeline = simulate(plan, costs)
        period = steady_period(plan, costs, self._has_barrier(option))
        bubble = period_bubble(timeline, period)
        return period, bubble, max(timeline.peak_memory), timeline.makespan

    def _refuse(self, option: Option, offload: str, error: ScheduleError) -> None:
        if isinstance(error, MemoryLimitError):
            _, _, needed = error.args
            self._least = min(self._least, needed + self._limits.taken(option))
            refused = Candidate(option, offload, "needs more memory", peak_memory=needed)
        else:
            refused = Candidate(option, offload, str(error).partition("\n")[0])
        self.found.append(refused)

    def may_gain(self, option: Option) -> bool:
        """Whether a search may find something that is worth it; notes why not."""
        why = self._no_gain(option)
        if why:
            self._refuse(option, "none", ScheduleError(f"not searched for: {why}"))
        return not why

    def _no_gain(self, option: Option) -> str:
        if self._limits.memory is None:
            return "it is for tight limits, and there is none"
        if not FAMILIES[option.schedule].heeds_limit:
            return "v is the same search, in all of the memory that there is"
        best = best_of(self.found)
        promised = inf if best is None else best.score / (self._bound(option) or inf) - 1
        if promised > _WORTH_SEARCHING:
            return ""
        return f"nothing can be more than {max(0.0, promised):.1%} faster than what there is"

    def _bound(self, option: Option) -> float:
        """Return seconds that no order of an option's stages gets below; 0 of no stages."""
        try:
            costs = self._costs(option)
        except ScheduleError:
            return 0.0
        placement = option.placement(self._num_ranks)
        seconds, hops = costs.compute(len(placement)), costs.hops(placement)
        if self._has_barrier(option):
            return earliest_end(seconds, hops, placement, option.num_microbatches)
        return most_work(seconds, placement, option.num_microbatches)

    def no_plan(self) -> ScheduleError:
        """Return what says why there is no plan."""
        limit = self._limits.memory
        if limit is None or self._least == inf:
            reason = self.found[0].reason if self.found else "there are no blocks for any"
            return ScheduleError(f"no plan can be made: {reason}")
        count = len(self.found)
        sentence = f"{{limit}} is less than any of {count} plans needs; use at least {{needed}}"
        return MemoryLimitError(sentence, limit, self._least)

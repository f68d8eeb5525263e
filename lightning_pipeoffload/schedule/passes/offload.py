"""A pass that plans the offload of activations, for any schedule of compute actions.

The stages with the longest lifespan come first: in a uniform schedule what a stage takes of the
peak is in proportion to it, so that half of the stages offloaded leave a quarter (Wan et al.,
"PipeOffload", ICML 2025, section 3). A rank computes in the same order with and without copies.
Where B and W are apart, what W alone needs comes back for W, and what waits for W goes to the host
too, if that leaves a smaller peak.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil
from typing import Any

from ..actions import (
    ACTIVATION,
    COPIES,
    KINDS,
    MEMORY_EFFECTS,
    RELOADS,
    TRANSFERS,
    WAITING,
    Action,
    Kind,
    MemoryLimitError,
    MemoryPart,
    ScheduleError,
)
from ..costs import COMPUTE_TIMES, Costs
from ..schedule import Schedule
from ..search.problem import ROUNDING
from ..simulation.memory import UnitSizes, memory_changes, part_sizes, peak_memory
from ..simulation.simulate import simulate
from .rank_offload import RankOffload, RankPlan, delay_warm_up_events
from .transfer import split_every_backward

SLOWDOWN_ALLOWED = 1.03
"""The makespan may grow by this factor before less is offloaded."""

_ROUNDING_ERROR = 1e-9  # Activations: so little above 3 counts as 3.
_NUM_FRACTIONS = 8  # Fractions of a share that are tried for the best.
_TIMES = (*COMPUTE_TIMES, "communication", "offload", "reload")
_LITTLE = 1e-6  # Of the longest time.
_NUM_LIMITS = 8  # that are tried for what to propose in place of one that is too small
_FEW_PLACES = 5  # A copy back begins up to so many actions and copies earlier.

_Place = tuple[int, int]


@dataclass(frozen=True)
class OffloadReport:
    """The result of offloading from a schedule.

    Attributes:
        wanted: How many activations of each rank were to be offloaded in a step.
        offloaded: How many are: away between F and B, or at least between B and W.
        kept: How many of those that were to be offloaded stay on the device of each rank.
        queued: How many have what waits for W on the host between B and W.
        slowdown: Makespan with offload over that without.
        peak_memory: Largest memory of each rank's device.
        reason: Why less is offloaded than was asked for; empty if it is not.
        is_paged: Whether ranks wait for copies, for no plan that hides them keeps the limit.
    """

    wanted: tuple[int, ...]
    offloaded: tuple[int, ...]
    kept: tuple[int, ...]
    queued: tuple[int, ...]
    slowdown: float
    peak_memory: tuple[float, ...]
    reason: str = ""
    is_paged: bool = False


Offloaded = tuple[Schedule, OffloadReport]


def _accepts_any(schedule: Schedule) -> bool:
    return True


def offload_activations(
    schedule: Schedule,
    costs: Costs,
    amount: str | float = "half",
    memory_limit: float | None = None,
    has_room: Callable[[Schedule], bool] = _accepts_any,
) -> Offloaded:
    """Add OFFLOAD, FREE and RELOAD to a schedule of compute actions.

    The activation of one stage and microbatch is then on the device (=) or on the host (-)::

        compute  F  OFFLOAD ..... FREE ............ RELOAD ..... B  W
        device   ===================                ================
        host             -----------------------------------------

    Where copies would take longer than there is (a copy there and back takes more than the compute
    of its stage, say), or the host has no room for them, less is offloaded: what gives each rank
    the smallest peak. But a limit comes before time: ranks wait for copies where none that are
    hidden keep it.

    Args:
        schedule: The schedule; lower it afterwards.
        costs: Seconds and memory, ``offload`` and ``reload`` among them.
        amount: ``"none"``, ``"half"`` (of an odd number of stages the larger half, where that
            leaves a smaller peak) or ``"full"``, a share of each rank's activations from 0 to 1, or
            ``"auto"``: as few of each rank as ``memory_limit`` asks for. A share goes by stages; of
            one that is not offloaded as a whole it takes evenly spread microbatches.
        memory_limit: The most memory of a rank, in the unit of the costs.
        has_room: Whether the hosts have room for what a schedule offloads. With a limit, which
            comes first, a schedule for which they have none is returned if no other keeps it.

    Returns:
        The schedule with its copies, and a report.

    Raises:
        ScheduleError: The amount is none of these, or the schedule has other actions than F, B, W
            and BW already.
        MemoryLimitError: The limit cannot be met.
    """
    if schedule.has_copies:
        raise ScheduleError(
            f"schedule {schedule.name} has copies of its own; ask for no offload, or use a "
            f"schedule without copies, such as uniform"
        )
    if others := schedule.kinds - {Kind.F, Kind.B, Kind.W, Kind.BW}:
        there = "transfers" if others & TRANSFERS else ", ".join(sorted(others))
        raise ScheduleError(
            f"schedule {schedule.name} has {there} already; offload before it is lowered, and "
            f"before other passes add to it"
        )
    planner = _Planner(schedule, costs, has_room)
    limit = float("inf") if memory_limit is None else memory_limit
    is_auto = amount == "auto"
    planned = planner.offload_within_limit(limit) if is_auto else planner.with_amount(amount)
    needed = max(planned[1].peak_memory)
    if needed > limit * (1 + ROUNDING):
        sizes = part_sizes(costs, schedule.num_stages, schedule.num_sequence_slices)
        if is_auto:
            is_exact = not sizes.key_values  # no copy moves these
            needed = (
                _single_unit_memory(sizes)
                if is_exact
                else _bisect_least_limit(planner, limit, needed)
            )
        advice = "" if is_auto else ", or offload=auto"
        sentence = (
            f"{{limit}} is less than the {{needed}} that {schedule.name} needs with "
            f"{'' if is_auto else 'this '}offload; use at least {{needed}}{advice}"
        )
        raise MemoryLimitError(sentence, limit, needed)
    return planned


def _bisect_least_limit(planner: _Planner, refused: float, kept: float) -> float:
    """Return the smallest peak that a bisection of limits finds."""
    for _ in range(_NUM_LIMITS):
        limit = (refused + kept) / 2
        peak = max(planner.offload_within_limit(limit)[1].peak_memory)
        if peak <= limit * (1 + ROUNDING):
            kept = peak
        else:
            refused = limit
    return kept


def parse_offload_amount(amount: str | float) -> float:
    """Return the share of the activations that an amount is.

    Args:
        amount: As for :func:`offload_activations`, but not ``"auto"``.

    Raises:
        ScheduleError: The amount is none of these.
    """
    named = {"none": 0.0, "half": 0.5, "full": 1.0}
    share = named.get(amount) if isinstance(amount, str) else amount
    if isinstance(share, (int, float)) and not isinstance(share, bool) and 0 <= share <= 1:
        return share
    raise ScheduleError(
        f"offload ({amount!r}) must be none, half, full, auto, or a share from 0 to 1"
    )


class _Planner:
    """A schedule in time, to which each rank's copies can be added."""

    def __init__(
        self, schedule: Schedule, costs: Costs, has_room: Callable[[Schedule], bool]
    ) -> None:
        self._schedule = schedule
        self._costs = costs
        self._has_room = has_room
        self._makespan = simulate(schedule, costs).makespan
        costs = _with_distinct_times(costs, schedule.num_stages)
        sizes = part_sizes(costs, schedule.num_stages, schedule.num_sequence_slices)
        # With the latest times of the warm-up, its activations are on the device for less time.
        self._ranks = [
            RankOffload(events, costs, sizes)
            for events in delay_warm_up_events(schedule, simulate(schedule, costs), costs)
        ]

    def with_amount(self, amount: str | float) -> Offloaded:
        """Offload an amount; for "half", round the number of stages to the smaller peak."""
        shares = [parse_offload_amount(amount)]
        num_chunks = self._schedule.num_stages // self._schedule.num_ranks
        if amount == "half" and num_chunks > 1 and num_chunks % 2:
            shares.append((num_chunks + 1) / 2 / num_chunks)
        return min(map(self._plan_hidden_share, shares), key=_largest_peak)

    def _plan_hidden_share(self, share: float) -> Offloaded:
        """Offload that share, or what slows down nothing and leaves the smallest peak."""
        planned = self._offload_share(share)
        if self._is_hidden(planned):
            return planned
        fewer = (self._offload_share(share * n / _NUM_FRACTIONS) for n in range(_NUM_FRACTIONS))
        # Never empty: the first plan offloads nothing, so it slows nothing down.
        free = [plan for plan in fewer if self._is_hidden(plan)]
        schedule, report = min(free, key=_largest_peak)
        return schedule, _with_wanted(report, planned[1].wanted)

    def offload_within_limit(self, memory_limit: float) -> Offloaded:
        """Offload as little as a limit asks for; where that slows down the step, what does least.

        Where not even waiting for copies keeps the limit, what needs least memory.
        """
        limit = memory_limit * (1 + ROUNDING)
        planned = self._joined([rank.plan_within_limit(limit) for rank in self._ranks])
        fits = _largest_peak(planned) <= limit
        if fits and self._is_hidden(planned):
            return planned
        shares = range(_NUM_FRACTIONS) if fits else ()  # each rank has tried more than shares
        others = (self._offload_share((n + 1) / _NUM_FRACTIONS) for n in shares)
        fitting = [plan for plan in (planned, *others) if _largest_peak(plan) <= limit]
        if waiting := _plan_paging(self._schedule, self._costs, memory_limit):
            fitting.append(self._report_paged(waiting))
        with_room = [plan for plan in fitting if self._has_room(plan[0])]
        return min(with_room or fitting, default=planned, key=_slowdown_and_copies)

    def _report_paged(self, schedule: Schedule) -> Offloaded:
        ranks = [Counter(action.kind for action in rank) for rank in schedule]
        away = tuple(len({a[1:] for a in rank if a.kind in COPIES}) for rank in schedule)
        report = OffloadReport(
            wanted=away,
            offloaded=tuple(kinds[Kind.OFFLOAD] for kinds in ranks),
            kept=(0,) * len(ranks),
            queued=tuple(kinds[Kind.OFFLOAD_W] for kinds in ranks),
            slowdown=self._slowdown(schedule),
            peak_memory=peak_memory(schedule, self._costs),
            is_paged=True,
        )
        return schedule, report

    def _slowdown(self, schedule: Schedule) -> float:
        makespan = simulate(schedule, self._costs).makespan
        return makespan / self._makespan if self._makespan else 1.0

    def _is_hidden(self, planned: Offloaded) -> bool:
        return planned[1].slowdown <= SLOWDOWN_ALLOWED and self._has_room(planned[0])

    def _offload_share(self, share: float) -> Offloaded:
        counts = (ceil(share * rank.num_activations - _ROUNDING_ERROR) for rank in self._ranks)
        return self._joined([r.plan_at_most(n) for r, n in zip(self._ranks, counts, strict=True)])

    def _joined(self, plans: list[RankPlan]) -> Offloaded:
        schedule = self._schedule.with_actions(plan.actions for plan in plans)
        report = OffloadReport(
            wanted=tuple(plan.wanted for plan in plans),
            offloaded=tuple(plan.offloaded for plan in plans),
            kept=tuple(plan.wanted - plan.num_moved for plan in plans),
            queued=tuple(plan.queued for plan in plans),
            slowdown=self._slowdown(schedule),
            peak_memory=tuple(plan.peak for plan in plans),
            reason=_reason(plans),
        )
        return schedule, report


def _with_distinct_times(costs: Costs, num_stages: int) -> Costs:
    """Return the same costs in a unit in which no two times count as equal that are not.

    Compute takes a little, for copies go by time to their places in the order.
    """
    seconds = {name: costs.per_stage(name, num_stages) for name in _TIMES}
    unit = max(map(max, seconds.values())) or 1.0
    least = {name: _LITTLE if name in COMPUTE_TIMES else 0.0 for name in _TIMES}
    counted: dict[str, Any] = {
        name: tuple(max(second / unit, least[name]) for second in of_stages)
        for name, of_stages in seconds.items()
    }
    return replace(costs, **counted)


def _largest_peak(planned: Offloaded) -> float:
    return max(planned[1].peak_memory)


def _slowdown_and_copies(planned: Offloaded) -> tuple[float, int]:
    report = planned[1]
    return report.slowdown, sum(report.offloaded) + sum(report.queued)


def _reason(plans: list[RankPlan]) -> str:
    too_short = sum(plan.too_short for plan in plans)
    crowded = sum(plan.wanted - plan.num_moved for plan in plans) - too_short
    reasons = {
        "what needs them follows too soon for a copy there and back": too_short,
        "there is no time for more copies, or more leave no smaller peak": crowded,
    }
    return "; ".join(f"{count} stay: {why}" for why, count in reasons.items() if count)


def _with_wanted(report: OffloadReport, wanted: tuple[int, ...]) -> OffloadReport:
    """Count against the amount that was asked for, where less was planned to save time."""
    less = tuple(asked - tried for asked, tried in zip(wanted, report.wanted, strict=True))
    if not any(less):
        return report
    kept = tuple(more + kept for more, kept in zip(less, report.kept, strict=True))
    reason = f"{sum(less)} stay: with their copies the step would take longer, or the hosts be full"
    reasons = "; ".join(filter(None, (report.reason, reason)))
    return replace(report, wanted=wanted, kept=kept, reason=reasons)


def _plan_paging(schedule: Schedule, costs: Costs, memory_limit: float) -> Schedule | None:
    """Return the same order with every BW as B and W, and with the copies that a limit asks for.

    As a machine pages memory: where there is no room, the part that is needed last goes to the
    host; it comes back before the action that needs it, earlier if there is room. Ranks may wait
    for these copies. None: one stage and microbatch needs more than the limit, or what no copy
    moves does.
    """
    sizes = part_sizes(costs, schedule.num_stages, schedule.num_sequence_slices)
    limit = memory_limit * (1 + ROUNDING)
    if _single_unit_memory(sizes) > limit:
        return None
    apart = split_every_backward(schedule)
    ranks = (
        _with_earlier_reloads(list(_Paging(rank, sizes, limit).run()), sizes, limit)
        for rank in apart
    )
    paged = schedule.with_actions(ranks)
    is_kept = not sizes.key_values or max(peak_memory(paged, costs)) <= limit
    return paged if is_kept else None


def _single_unit_memory(sizes: UnitSizes) -> float:
    """Return the memory of a rank that has one stage and microbatch on its device at a time."""
    return max(max(of_unit[ACTIVATION], of_unit[WAITING]) for of_unit in sizes.of)


class _Paging:
    """One rank's actions, and what is on its device before and after each."""

    def __init__(self, order: tuple[Action, ...], sizes: UnitSizes, limit: float) -> None:
        self._order, self._sizes, self._limit = order, sizes, limit
        self._index = {action: index for index, action in enumerate(order)}
        self._device: dict[_Place, int] = {}
        self._resident = 0.0  # what no copy moves: keys and values of slices
        self._copied: defaultdict[_Place, set[Kind]] = defaultdict(set)
        self._frees: defaultdict[int, list[Action]] = defaultdict(list)

    def run(self) -> Iterator[Action]:
        """Yield the rank's actions and its copies."""
        for index, action in enumerate(self._order):
            if action.kind in MEMORY_EFFECTS:
                self._make_room(index, action)
        for index, action in enumerate(self._order):
            copied = self._copied[action[1:]]
            yield from self._frees[index]
            if action.kind is Kind.B and Kind.OFFLOAD in copied:
                in_parts = Kind.OFFLOAD_W in copied
                yield action._replace(kind=Kind.RELOAD_B if in_parts else Kind.RELOAD)
            if action.kind is Kind.W and Kind.OFFLOAD_W in copied:
                yield action._replace(kind=Kind.RELOAD_W)
            yield action
            copy = {Kind.F: Kind.OFFLOAD, Kind.B: Kind.OFFLOAD_W}.get(action.kind)
            if copy in copied:
                yield action._replace(kind=copy)

    def _make_room(self, index: int, action: Action) -> None:
        """Make room for an action and its inputs."""
        place, row, change = action[1:], KINDS[action.kind], self._sizes.key_value_change(action)
        size = self._sizes.at(*place)
        # B keeps what W alone needs on the device.
        before = ACTIVATION if action.kind is Kind.B else row.needs
        after = (before & ~row.drops) | row.puts
        self._device[place] = int(before)
        most = max(size[before], size[after]) + self._resident + max(0.0, change)
        while most + self._in_use(place) > self._limit and self._evict(place, index):
            pass
        self._device[place] = int(after)
        self._resident += change

    def _in_use(self, but: _Place) -> float:
        return sum(self._sizes.at(*p)[parts] for p, parts in self._device.items() if p != but)

    def _evict(self, but: _Place, now: int) -> bool:
        """Copy the part that is needed last to the host; return whether there is any."""
        held = (place for place, parts in self._device.items() if place != but and parts)
        place = max(held, key=self._next_use, default=None)
        if place is None:
            return False
        is_before_b = now <= self._index[Action(Kind.B, *place)]
        waits_for_w = self._device[place] & WAITING and not is_before_b
        kinds = (Kind.OFFLOAD_W, Kind.FREE_W) if waits_for_w else (Kind.OFFLOAD, Kind.FREE)
        self._copied[place].add(kinds[0])
        self._frees[now].append(Action(kinds[1], *place))
        self._device[place] = 0
        return True

    def _next_use(self, place: _Place) -> int:
        kind = Kind.W if self._device[place] & MemoryPart.GRADIENT else Kind.B
        return self._index[Action(kind, *place)]


def _with_earlier_reloads(actions: list[Action], sizes: UnitSizes, limit: float) -> list[Action]:
    """Start copies back a few actions earlier, where there is room."""
    changes = list(memory_changes(actions, sizes, MEMORY_EFFECTS))
    # What there is before each action, and after the last.
    levels = list(accumulate(changes, initial=0.0))
    for end, action in enumerate([*actions]):
        start = end
        while action.kind in RELOADS and start > max(0, end - _FEW_PLACES):
            is_own = actions[start - 1][1:] == action[1:]
            if is_own or max(levels[start - 1 : start + 1]) + changes[end] > limit:
                break
            start -= 1
        actions[start : end + 1] = [action, *actions[start:end]]
        changes[start : end + 1] = [changes[end], *changes[start:end]]
        levels[start : end + 2] = accumulate(changes[start : end + 1], initial=levels[start])
    return actions

"""Which activations go to the host, and when: a pass on any schedule of compute actions.

The stages with the longest lifespan come first: in a uniform schedule what a stage takes of the
peak is in proportion to it, so that half of the stages offloaded leave a quarter (Wan et al.,
"PipeOffload", ICML 2025, section 3). A rank computes in the same order with and without copies.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from .actions import Action, Kind, ScheduleError
from .copy_slots import Copied, Copy, place_copies
from .costs import Costs
from .memory import peak_memory
from .postpone import postponed
from .problem import ROUNDING
from .schedule import Schedule
from .simulate import simulate
from .timeline import Event

__all__ = ["OffloadReport", "offload_activations"]

SLOWDOWN_ALLOWED = 1.03
"""What the makespan may grow by before less is offloaded."""

TOLERANCE = 1e-9


@dataclass(frozen=True)
class OffloadReport:
    """What an offload pass has done.

    Attributes:
        num_stages: How many stages of each rank were to be offloaded.
        offloaded: How many activations each rank offloads in a step.
        kept: How many activations of those stages stay on the device of each rank: there is no time
            to copy them and back between F and B.
        slowdown: Makespan with offload over that without.
        peak_memory: Largest memory of each rank's device.
        reason: Why less is offloaded than was asked for; empty if it is not.
    """

    num_stages: int
    offloaded: tuple[int, ...]
    kept: tuple[int, ...]
    slowdown: float
    peak_memory: tuple[float, ...]
    reason: str = ""


Offloaded = tuple[Schedule, OffloadReport]


def offload_activations(
    schedule: Schedule,
    costs: Costs,
    amount: str | float = "half",
    memory_limit: float | None = None,
) -> Offloaded:
    """Add OFFLOAD, FREE and RELOAD to a schedule of compute actions.

    Where copies would take longer than there is (a copy there and back takes more than the compute
    of its stage, say), fewer stages are offloaded: as many as give the smallest peak.

    Args:
        schedule: What to offload from; lower it afterwards.
        costs: Seconds and memory, ``offload`` and ``reload`` among them.
        amount: ``"none"``, ``"half"`` or ``"full"``, a share of each rank's stages from 0 to 1, or
            ``"auto"``: as few as ``memory_limit`` asks for.
        memory_limit: The most memory of a rank, in the unit of the costs.

    Returns:
        The schedule with its copies, and a report.

    Raises:
        ScheduleError: The amount is none, the schedule has copies or transfers already, or the
            limit cannot be met.
    """
    if schedule.has_transfers or schedule.has_copies:
        raise ScheduleError(
            f"schedule {schedule.name} has copies or transfers already; "
            "offload before it is lowered, and once"
        )
    planner = _Planner(schedule, costs)
    most = schedule.num_chunks
    if amount == "auto":
        return _least_that_fits(planner, most, memory_limit)
    planned = _most_that_is_free(planner, ceil(_share(amount) * most - TOLERANCE))
    _check_limit(schedule, planned[1].peak_memory, memory_limit)
    return planned


def _share(amount: str | float) -> float:
    named = {"none": 0.0, "half": 0.5, "full": 1.0}
    share = named.get(amount) if isinstance(amount, str) else amount
    if share is None or not 0 <= share <= 1:
        raise ScheduleError(
            f"offload ({amount!r}) must be none, half, full, auto, or a share from 0 to 1"
        )
    return share


def _least_that_fits(planner: _Planner, most: int, memory_limit: float | None) -> Offloaded:
    planned = planner.plan(0)
    peaks = [max(planned[1].peak_memory)]
    for count in range(1, most + 1):
        if memory_limit is None or peaks[-1] <= memory_limit * (1 + ROUNDING):
            return planned
        planned = planner.plan(count)
        peaks.append(max(planned[1].peak_memory))
    if memory_limit is not None and peaks[-1] > memory_limit * (1 + ROUNDING):
        raise ScheduleError(
            f"memory_limit ({memory_limit:.10g}) is less than the {min(peaks):.10g} that "
            f"{planner.schedule.name} needs with offload; use at least {min(peaks):.10g}"
        )
    return planned


def _most_that_is_free(planner: _Planner, count: int) -> Offloaded:
    wanted = planner.plan(count)
    if not any(wanted[1].kept) and wanted[1].slowdown <= SLOWDOWN_ALLOWED:
        return wanted
    fewer = [planner.plan(fewer) for fewer in range(count)]
    free = [plan for plan in (wanted, *reversed(fewer)) if plan[1].slowdown <= SLOWDOWN_ALLOWED]
    best = min(free, key=lambda plan: max(plan[1].peak_memory))
    if best is wanted:
        return wanted
    reason = f"{best[1].num_stages} stages instead of {count} leave a smaller peak: copies are late"
    return best[0], replace(best[1], reason=reason)


def _check_limit(schedule: Schedule, peaks: tuple[float, ...], memory_limit: float | None) -> None:
    if memory_limit is not None and max(peaks) > memory_limit * (1 + ROUNDING):
        raise ScheduleError(
            f"memory_limit ({memory_limit:.10g}) is less than the {max(peaks):.10g} that "
            f"{schedule.name} needs with this offload; use offload=auto, or a limit of "
            f"{max(peaks):.10g}"
        )


class _Planner:
    """A schedule in time, to which copies of any number of stages can be added."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self._costs = costs
        timeline = simulate(schedule, costs)
        self._makespan = timeline.makespan
        self._events = postponed(schedule, timeline, costs)
        self._activations = [list(self._copied(events)) for events in self._events]

    def plan(self, count: int) -> Offloaded:
        """Offload the stages with the longest lifespan, so many of each rank."""
        ranks, offloaded, kept = [], [], []
        for events, activations in zip(self._events, self._activations, strict=True):
            chosen = _longest(activations, count)
            placed, late = place_copies(chosen, self._costs.copy_lanes)
            copies = _worthwhile(events, placed)
            offloaded.append(len(copies) // 3)
            kept.append(len(chosen) - len(copies) // 3)
            ranks.append(_merged(events, copies))
        schedule = Schedule.of(ranks, self.schedule.name)
        makespan = simulate(schedule, self._costs).makespan
        slowdown = makespan / self._makespan if self._makespan else 1.0
        reason = f"{sum(kept)} activations stay: B follows F too soon" if any(kept) else ""
        peaks = peak_memory(schedule, self._costs)
        figures = (tuple(offloaded), tuple(kept), slowdown, peaks, reason)
        return schedule, OffloadReport(count, *figures)

    def _copied(self, events: list[Event]) -> Iterator[Copied]:
        num_stages = self.schedule.num_stages
        offload = self._costs.per_stage("offload", num_stages)
        reload = self._costs.per_stage("reload", num_stages)
        saved: dict[tuple[int, int], float] = {}
        for event in events:
            kind, stage, microbatch = event.action
            if kind is Kind.F:
                saved[stage, microbatch] = event.end
            elif kind in (Kind.B, Kind.BW):
                span = saved[stage, microbatch], event.start
                yield Copied(stage, microbatch, *span, offload[stage], reload[stage])


def _longest(activations: list[Copied], count: int) -> list[Copied]:
    """Return the activations of a rank's stages with the longest lifespan on average."""
    total: dict[int, float] = {}
    for copied in activations:
        total[copied.stage] = total.get(copied.stage, 0.0) + copied.lifespan
    stages = set(sorted(total, key=lambda stage: (-total[stage], stage))[:count])
    return [copied for copied in activations if copied.stage in stages]


Placed = tuple[int, float, Action]
"""Before which of its rank's actions a copy is started or freed, and when."""


def _worthwhile(events: list[Event], copies: list[Copy]) -> list[Placed]:
    """Return where copies are started and freed, without those freed when they must come back."""
    starts, ends = [event.start for event in events], [event.end for event in events]
    placed = [(bisect_right(ends, c.start + TOLERANCE), c.start, c.action) for c in copies]
    freed = [
        (bisect_left(starts, c.end - TOLERANCE), c.end, c.action._replace(kind=Kind.FREE))
        for c in copies
        if c.action.kind is Kind.OFFLOAD
    ]
    back = {action[1:]: place for place, _, action in placed if action.kind is Kind.RELOAD}
    worthwhile = {action[1:] for place, _, action in freed if place < back[action[1:]]}
    return [entry for entry in (*freed, *placed) if entry[2][1:] in worthwhile]


def _merged(events: list[Event], copies: list[Placed]) -> list[Action]:
    """Return a rank's order; of copies at one time, FREE comes before what takes memory."""
    computed = [(place, float("inf"), 0, event.action) for place, event in enumerate(events)]
    others = [(place, time, _AT_ONE_TIME[a.kind], a) for place, time, a in copies]
    order = sorted([*computed, *others], key=lambda entry: entry[:3])
    return [action for *_, action in order]


_AT_ONE_TIME = {Kind.OFFLOAD: 0, Kind.FREE: 1, Kind.RELOAD: 2}

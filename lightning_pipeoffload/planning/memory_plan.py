"""The order of a step together with what it offloads, by what is known of the costs.

Before anything has run, a plan that was asked to offload does so as if a copy there and back took
as long as its stage's computing, and one that has a limit to keep needs as little memory as there
can be. After the first steps it is made anew, with the costs that were measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_pipeoffload.planning.machine_limits import MachineLimits
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.schedule import (
    UNMEASURED,
    Costs,
    MemoryLimitError,
    OffloadReport,
    Schedule,
    ScheduleError,
    accept,
    offload_activations,
    one_at_a_time,
    split_every_backward,
    split_fused_backward,
    steady_period,
)
from lightning_pipeoffload.schedule.candidates import period_to_compare
from lightning_pipeoffload.schedule.evaluation import Limits
from lightning_pipeoffload.schedule.mebibytes import mebibytes

_NO_LIMITS = MachineLimits()

MemoryPlan = tuple[Schedule, OffloadReport | None]


def plan_before_measuring(
    settings: PipelineSettings, num_ranks: int, num_microbatches: int, on_accelerator: bool = False
) -> MemoryPlan:
    """Build the schedule of the first steps; under a limit they run one microbatch at a time.

    Args:
        settings: The strategy's settings.
        num_ranks: The number of ranks of the pipeline.
        num_microbatches: The number of microbatches of a batch.
        on_accelerator: Whether the ranks' devices have a memory of their own.

    Raises:
        ScheduleError: There is no schedule for these numbers, or it offloads of its own accord.
    """
    schedule = settings.make_schedule(num_ranks, num_microbatches)
    if settings.offload not in ("auto", "none") and schedule.has_copies:
        raise ScheduleError(
            f"schedule {schedule.name} says itself what it offloads, and offload="
            f"{settings.offload!r} was asked for; leave that at auto, or use a schedule without "
            f"copies, such as uniform"
        )
    if settings.offload not in ("auto", "none"):
        return offload_activations(schedule, UNMEASURED, settings.offload)
    if settings.is_limited(on_accelerator) and not schedule.has_copies:
        return one_at_a_time(schedule), None
    return schedule, None


def plan_by_costs(
    settings: PipelineSettings,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    limits: MachineLimits = _NO_LIMITS,
    has_barrier: bool = False,
) -> MemoryPlan:
    """Build the schedule that fits measured costs, the memory limit and the hosts.

    ``offload="auto"`` is the fastest plan within the limit, of about equal ones that which copies
    nothing. Where the limit is the devices' own and nothing keeps it, what needs least is tried.

    Args:
        settings: The strategy's settings.
        num_ranks: The number of ranks of the pipeline.
        num_microbatches: The number of microbatches of a batch.
        costs: Costs in seconds and bytes.
        limits: The limits of the machines.
        has_barrier: Whether no rank begins a step before all have ended the one before.

    Raises:
        ScheduleError: No plan keeps within the limit that was given; the message has the smallest
            that one does. Or a rank would take more of its host than it may.
    """
    try:
        planned = _plan(settings, (num_ranks, num_microbatches), costs, limits, has_barrier)
    except MemoryLimitError as error:
        raise ScheduleError(error.told(mebibytes)) from None
    shortage = limits.shortage(planned[0], costs)
    if shortage:
        raise ScheduleError(
            f"{shortage}; allow more with host_memory_limit if the machine has it, offload less "
            f'or, with offload=auto, raise memory_limit, or use recompute="cheap"'
        )
    return planned


def keeps_limits(
    schedule: Schedule, costs: Costs, memory_limit: float | None, limits: MachineLimits
) -> bool:
    """Whether a plan needs no more than there is, by these costs.

    Args:
        schedule: The plan.
        costs: Costs in seconds and bytes.
        memory_limit: Bytes that each rank may use for activations; None: any.
        limits: The limits of the machines.
    """
    try:
        accept(split_fused_backward(schedule), costs, memory_limit)
    except ScheduleError:
        return False
    return not limits.shortage(schedule, costs)


def limits_of_plans(settings: PipelineSettings, limits: MachineLimits) -> Limits:
    """Return what plans have to keep where any of several schedules may be taken."""

    def has_room(schedule: Schedule, costs: Costs) -> bool:
        return not limits.shortage(schedule, costs)

    return Limits(settings.limit_on(limits.device), settings.offload, has_room)


def _plan(
    settings: PipelineSettings,
    sizes: tuple[int, int],
    costs: Costs,
    limits: MachineLimits,
    has_barrier: bool,
) -> MemoryPlan:
    given = settings.limit_bytes
    if settings.offload == "none":
        return settings.make_schedule(*sizes, costs, given, has_barrier), None
    if settings.offload != "auto":
        schedule = settings.make_schedule(*sizes)
        planned = offload_activations(schedule, costs, settings.offload, given)
        accept(split_fused_backward(planned[0]), costs, given)
        return planned
    free = settings.make_schedule(*sizes, costs, None, has_barrier)
    found = list(_within(settings, free, costs, limits, has_barrier))
    if found:
        return min(found, key=lambda plan: _seconds(plan, costs, has_barrier))
    if free.has_copies:
        return settings.make_schedule(*sizes, costs, given, has_barrier), None
    amount = "full" if given is None else "auto"
    return _offload(free, costs, amount, given, limits)


def _within(
    settings: PipelineSettings,
    free: Schedule,
    costs: Costs,
    limits: MachineLimits,
    has_barrier: bool,
) -> Iterator[MemoryPlan]:
    """Yield what keeps the limits: an order made for them; ``free``, which is not, with copies."""
    limit = settings.limit_on(limits.device)
    sizes = free.num_ranks, free.num_microbatches
    ordered = None
    try:
        ordered = settings.make_schedule(*sizes, costs, limit, has_barrier)
        yield ordered, None
    except ScheduleError:
        pass  # no order keeps the limit without copies; with them one may
    # Where the fastest order keeps the limit as it is, copies would be for nothing.
    if ordered == free or free.has_copies:
        return
    try:
        planned = _offload(free, costs, "auto", limit, limits)
    except ScheduleError:
        return
    if not limits.shortage(planned[0], costs):
        yield planned


def _offload(
    schedule: Schedule, costs: Costs, amount: str, limit: float | None, limits: MachineLimits
) -> MemoryPlan:
    def has_room(offloaded: Schedule) -> bool:
        return not limits.shortage(offloaded, costs)

    return offload_activations(split_every_backward(schedule), costs, amount, limit, has_room)


def _seconds(plan: MemoryPlan, costs: Costs, has_barrier: bool) -> float:
    schedule, report = plan
    return period_to_compare(steady_period(schedule, costs, has_barrier), report is not None)

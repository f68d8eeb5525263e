"""The order of a step together with what it offloads, by what is known of the costs.

Before anything has run, a plan that was asked to offload does so as if a copy there and back took
as long as its stage's computing, and one that has a limit to keep needs as little memory as there
can be. After the first steps it is made anew, with the costs that were measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_pipeoffload.schedule import (
    UNMEASURED,
    Costs,
    OffloadReport,
    Schedule,
    ScheduleError,
    offload_activations,
    one_at_a_time,
    simulate,
)
from lightning_pipeoffload.settings import PipelineSettings

MemoryPlan = tuple[Schedule, OffloadReport | None]

# A plan that copies nothing is preferred to one that is faster by less than this.
_WORTH_COPYING = 0.01


def plan_before_measuring(
    settings: PipelineSettings, num_ranks: int, num_microbatches: int, on_accelerator: bool = False
) -> MemoryPlan:
    """Build the schedule of the first steps; under a limit they run one microbatch at a time.

    Args:
        settings: the strategy's.
        num_ranks: of the pipeline.
        num_microbatches: of a batch.
        on_accelerator: the ranks' devices have a memory of their own.

    Raises:
        ScheduleError: there is none for these numbers.
    """
    schedule = settings.make_schedule(num_ranks, num_microbatches)
    if settings.offload not in ("auto", "none") and not schedule.has_copies:
        return offload_activations(schedule, UNMEASURED, settings.offload)
    if settings.is_limited(on_accelerator) and not schedule.has_copies:
        return one_at_a_time(schedule), None
    return schedule, None


def plan_by_costs(
    settings: PipelineSettings,
    num_ranks: int,
    num_microbatches: int,
    costs: Costs,
    device_limit: float | None = None,
) -> MemoryPlan:
    """Build the schedule that fits measured costs and the memory limit.

    ``offload="auto"`` is the fastest plan within the limit, of about equal ones that which copies
    nothing. Where the limit is the devices' own and nothing keeps it, what needs least is tried.

    Args:
        settings: the strategy's.
        num_ranks: of the pipeline.
        num_microbatches: of a batch.
        costs: in seconds and bytes.
        device_limit: what the devices have left for a plan, in bytes; None: no limit.

    Raises:
        ScheduleError: no plan keeps within the limit that was given; the message has the smallest
            that one does.
    """
    given, sizes = settings.limit_bytes, (num_ranks, num_microbatches)
    if settings.offload == "none":
        return settings.make_schedule(*sizes, costs, given), None
    if settings.offload != "auto":
        schedule = settings.make_schedule(*sizes)
        return offload_activations(schedule, costs, settings.offload, given)
    limit = device_limit if given is None else given
    found = list(_within(settings, sizes, costs, limit))
    if found:
        return min(found, key=lambda plan: _seconds(plan, costs))
    schedule = settings.make_schedule(*sizes, costs)
    if schedule.has_copies:
        return settings.make_schedule(*sizes, costs, given), None
    amount = "full" if given is None else "auto"
    return offload_activations(schedule, costs, amount, given)


def _within(
    settings: PipelineSettings, sizes: tuple[int, int], costs: Costs, limit: float | None
) -> Iterator[MemoryPlan]:
    """Yield what keeps the limit: by its order alone, and by copies in the order without one."""
    free = settings.make_schedule(*sizes, costs)
    ordered = None
    try:
        ordered = settings.make_schedule(*sizes, costs, limit)
        yield ordered, None
    except ScheduleError:
        pass
    if ordered == free or free.has_copies:
        return
    try:
        yield offload_activations(free, costs, "auto", limit)
    except ScheduleError:
        return


def _seconds(plan: MemoryPlan, costs: Costs) -> float:
    schedule, report = plan
    return simulate(schedule, costs).makespan * (1.0 if report is None else 1 + _WORTH_COPYING)

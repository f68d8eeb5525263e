"""The order of a step together with what it offloads, by what is known of the costs.

Before anything has run, a plan that was asked to save memory offloads as much as copies that take
as long as their stage's computing would allow; after the first steps it is made anew, with the
costs that were measured.
"""

from __future__ import annotations

from lightning_pipeoffload.schedule import (
    UNMEASURED,
    Costs,
    OffloadReport,
    Schedule,
    ScheduleError,
    offload_activations,
)
from lightning_pipeoffload.settings import PipelineSettings

MemoryPlan = tuple[Schedule, OffloadReport | None]


def plan_before_measuring(
    settings: PipelineSettings, num_ranks: int, num_microbatches: int
) -> MemoryPlan:
    """Build the schedule of the first steps; under a memory limit it offloads what it can.

    Raises:
        ScheduleError: there is none for these numbers.
    """
    schedule = settings.make_schedule(num_ranks, num_microbatches)
    if schedule.has_copies or not settings.plans_memory or settings.offload == "none":
        return schedule, None
    amount = "full" if settings.offload == "auto" else settings.offload
    return offload_activations(schedule, UNMEASURED, amount)


def plan_by_costs(
    settings: PipelineSettings, num_ranks: int, num_microbatches: int, costs: Costs
) -> MemoryPlan:
    """Build the schedule that fits measured costs and the memory limit.

    Args:
        settings: the strategy's.
        num_ranks: of the pipeline.
        num_microbatches: of a batch.
        costs: in seconds and bytes.

    Raises:
        ScheduleError: no plan keeps within the limit; the message has the smallest limit that does.
    """
    limit = settings.limit_bytes
    if settings.offload in ("auto", "none"):
        try:
            return settings.make_schedule(num_ranks, num_microbatches, costs, limit), None
        except ScheduleError:
            if settings.offload == "none":
                raise
    schedule = settings.make_schedule(num_ranks, num_microbatches)
    return offload_activations(schedule, costs, settings.offload, limit)

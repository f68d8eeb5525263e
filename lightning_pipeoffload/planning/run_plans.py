"""A run's plans: the requests that its settings fill, made on one process and sent to all.

The first steps run before costs are known: a plan that was asked to offload does so as if a copy
there and back took as long as its stage's computing, and one with a memory limit needs as little
memory as possible. After them the plan is made again with measured costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from lightning_pipeoffload.planning.limits import MachineLimits, bytes_formatter
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.comm import PipelineGroup
from lightning_pipeoffload.schedule import (
    FAMILIES,
    UNMEASURED,
    Costs,
    HostMemoryLimitError,
    Job,
    MemoryLimitError,
    OffloadReport,
    Plan,
    PlanRequest,
    RankLimits,
    Schedule,
    ScheduleError,
    check_schedule,
    device_indices,
    make_plan,
    offload_activations,
    serialize_microbatches,
    split_fused_backward,
)

_NO_LIMITS = MachineLimits()


def build_first_schedule(
    settings: PipelineSettings, num_ranks: int, num_microbatches: int, on_accelerator: bool = False
) -> tuple[Schedule, OffloadReport | None]:
    """Build the schedule of the first steps; under a limit they run one microbatch at a time.

    Raises:
        ScheduleError: There is no schedule for these numbers, or it offloads of its own accord.
    """
    schedule = settings.make_schedule(num_ranks, num_microbatches)
    if settings.offload not in ("auto", "none"):
        return offload_activations(schedule, UNMEASURED, settings.offload)
    if settings.is_limited(on_accelerator) and not schedule.has_copies:
        return serialize_microbatches(schedule), None
    return schedule, None


def request_for_run(
    settings: PipelineSettings,
    request: PlanRequest,
    limits: MachineLimits = _NO_LIMITS,
    must_fit: bool = False,
) -> PlanRequest:
    """Return the request of a run: what is planned, by its settings and the machines it is on.

    Where a single option is planned and the limit is the device's own, the plan that offloads the
    most is returned if none keeps that limit.

    Args:
        settings: The strategy's settings.
        request: What is planned, by costs in seconds and bytes; its limits, offload, recipes and
            messages are replaced by those of the settings and machines.
        limits: The memory that the machines have left.
        must_fit: Whether a single option is refused too; it is where ``memory_limit`` is given.
    """
    own = limits.devices if settings.offload == "auto" else None
    return replace(
        request,
        memory_limit=settings.device_limits(request.num_ranks, own),
        offload=settings.offload,
        device_names=limits.names,
        describe_host_shortage=limits.describe_host_shortage,
        must_fit=must_fit or settings.memory_limit is not None,
        omits_above=inf,
        format_memory=bytes_formatter(settings.memory_limit),
        recipes={**FAMILIES, **settings.user_recipe},
    )


def make_plan_with_advice(request: PlanRequest) -> Plan:
    """Make a plan; errors have bytes with their unit and name the argument to set.

    Raises:
        ScheduleError: No plan keeps the limits; the message has the smallest limit that one does,
            or the rank that would take more of its host than it may.
    """
    try:
        return make_plan(request)
    except MemoryLimitError as error:
        raise ScheduleError(error.message(request.format_memory)) from None
    except HostMemoryLimitError as error:
        raise ScheduleError(
            f"{error}; allow more with host_memory_limit if the machine has it, offload less or, "
            f'with offload=auto, raise memory_limit, or use recompute="cheap"'
        ) from None


def make_plan_on_all_ranks(group: PipelineGroup, request: PlanRequest) -> Plan:
    """Make a plan on all processes, each of which plans a part of the options; all ranks call it.

    A single option is planned on the process that reports. Of other options than the best a
    process has only those schedules that it has made.

    Raises:
        ScheduleError: As by :func:`make_plan_with_advice`, on every rank.
    """
    if len(request.options) > 1:
        return make_plan_with_advice(replace(request, share=partial(_distribute_jobs, group)))
    plan, error = None, ""
    if group.is_global_zero:
        try:
            plan = make_plan_with_advice(request)
        except ScheduleError as refused:
            error = str(refused)
    sent, error = group.world.broadcast((plan and plan.without_candidate_schedules, error), 0)
    if sent is None:
        raise ScheduleError(error)
    return plan or sent


def _distribute_jobs(
    group: PipelineGroup, jobs: Sequence[Job], lean: Callable[[Any], Any]
) -> list[Any]:
    if not jobs:
        return []
    num_processes, process = group.world.num_processes, group.global_rank
    local = {n: run() for n, (place, run) in enumerate(jobs) if place % num_processes == process}
    sent = group.world.gather({number: lean(result) for number, result in local.items()})
    results = {number: result for each in (*sent, local) for number, result in each.items()}
    return [results[number] for number in range(len(jobs))]


def keeps_limits(
    schedule: Schedule, costs: Costs, settings: PipelineSettings, limits: MachineLimits
) -> bool:
    """Whether a plan keeps the memory limits and the hosts', by costs in seconds and bytes."""
    of_ranks = rank_limits(settings, limits, schedule.placement)
    try:
        if of_ranks is None:
            check_schedule(split_fused_backward(schedule), costs)
        else:
            check_schedule(
                split_fused_backward(schedule),
                of_ranks.scale_to_common_limit(costs),
                of_ranks.common_limit,
            )
    except ScheduleError:
        return False
    return not limits.describe_host_shortage(schedule, costs)


def rank_limits(
    settings: PipelineSettings, limits: MachineLimits, placement: Sequence[int]
) -> RankLimits | None:
    """Return the memory limit of each rank of a plan; None: there is none."""
    places = device_indices(placement)
    of_places = settings.device_limits(len(places), limits.devices)
    if of_places is None:
        return None
    return RankLimits((*(of_places[place] for place in places),), (*placement,))

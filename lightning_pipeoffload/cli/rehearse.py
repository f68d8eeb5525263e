"""``pipeoffload-rehearse``: one rank of a large pipeline runs alone on this machine.

It is a Hydra application on conf/rehearse.yaml. The rank's stages, their offload and copies are the
real ones; what other ranks would send comes when the plan says, delayed on the device's stream.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_pipeoffload.cli.configuration import run_hydra_app
from lightning_pipeoffload.cli.costs_file import write_costs
from lightning_pipeoffload.cli.rehearsal_report import Rehearsed, print_rehearsed
from lightning_pipeoffload.cli.rehearsed_model import RehearsedModel
from lightning_pipeoffload.planning.memory_needs import ON_DEVICE, MemoryNeeds
from lightning_pipeoffload.planning.plan_request import plan_of, request_by_name
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.measure.block_costs import StageCosts
from lightning_pipeoffload.runtime.measure.link_speed import CopySpeed, measure_copy_speed
from lightning_pipeoffload.runtime.memory.ledger import Ledger
from lightning_pipeoffload.runtime.memory.streams import make_lanes
from lightning_pipeoffload.runtime.rank_memory import ActivationMemory
from lightning_pipeoffload.runtime.rehearsal import Rehearsal
from lightning_pipeoffload.schedule import (
    COPIES,
    Costs,
    Schedule,
    ScheduleError,
    Timeline,
    copy_ratios,
    lower,
    simulate,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["main", "rehearse"]

_FORMATS = ("text", "json")


def rehearse(config: DictConfig) -> None:
    """Run the rank that ``config`` names alone, and print what it takes.

    Args:
        config: Conf/rehearse.yaml with the command line's overrides.

    Raises:
        ValueError: The model, its data or the plan cannot be, or there is no such rank.
    """
    if config.format not in _FORMATS:
        raise ScheduleError(f"format ({config.format}) must be one of {', '.join(_FORMATS)}")
    num_ranks, rank = int(config.num_ranks), int(config.rank)
    if not 0 <= rank < num_ranks:
        raise ScheduleError(f"rank ({rank}) must be from 0 to {num_ranks - 1}, of {num_ranks}")
    device = _device(config.device)
    settings = _settings(config)
    model = RehearsedModel(config)
    count = settings.choose_num_microbatches(num_ranks, model.batch_size)
    schedule = settings.make_schedule(num_ranks, count)
    pipeline = model.make(schedule, settings, rank, device)
    host = settings.host_budget(num_local_ranks=1)
    run = Rehearsal(pipeline, ActivationMemory.on(device, host), model.cut)
    try:
        found, costs = _run(run, settings, schedule, model.needs, int(config.num_steps))
    finally:
        pipeline.detach()
    print_rehearsed(found, config.format)
    if config.costs_file is not None:
        write_costs(str(config.costs_file), costs, num_ranks, schedule.num_stages)


def _run(
    run: Rehearsal,
    settings: PipelineSettings,
    schedule: Schedule,
    needs: MemoryNeeds,
    num_steps: int,
) -> tuple[Rehearsed, Costs]:
    """Measure the stages, plan with what they cost, and run that plan."""
    rank, count = run.pipeline.rank, schedule.num_microbatches
    speed = measure_copy_speed(run.pipeline.device)
    own = run.measure_stages(schedule, speed)
    costs = _costs_of_all(needs.costs, own, speed, schedule.num_stages)
    plan = lower(plan_of(request_by_name(settings, schedule.num_ranks, count, costs)).schedule)
    run.memory.ledger = Ledger()
    run.memory.use_lanes(make_lanes(run.pipeline.device, costs.copy_lanes))
    seconds = run.run(plan, costs, num_steps)
    timeline = simulate(plan, costs)
    ledger = run.memory.ledger
    kept = needs.of_ranks(plan)[rank]
    found = Rehearsed(
        plan.name,
        plan.num_ranks,
        count,
        rank,
        {index: stage._asdict() for index, stage in own.items()},
        seconds,
        _end_of(timeline, rank),
        max(copy_ratios(costs, plan.num_stages)),
        _hidden_share(plan, rank, costs, timeline, seconds),
        ledger.peak_device_bytes,
        int(timeline.peak_memory[rank]),
        ledger.peak_host_bytes,
        {name: getattr(kept, name) for name in ON_DEVICE},
        settings.limit_bytes,
    )
    return found, costs


def _costs_of_all(
    shapes: Costs, own: dict[int, StageCosts], speed: CopySpeed, num_stages: int
) -> Costs:
    """Return the costs of all stages: those elsewhere in proportion to their operations.

    Memory is that of shapes, which know all stages.
    """
    seconds: dict[str, Any] = {}
    for name in ("forward", "backward_input", "backward_weight"):
        counted = shapes.per_stage(name, num_stages)
        known = sum(counted[stage] for stage in own)
        unit = sum(getattr(cost, name) for cost in own.values()) / known if known else 0.0
        found = {stage: getattr(cost, name) for stage, cost in own.items()}
        seconds[name] = [found.get(stage, counted[stage] * unit) for stage in range(num_stages)]
    kept = shapes.per_stage("activation", num_stages)
    return replace(
        shapes,
        **seconds,
        offload=[size / speed.to_host * speed.slowed_by for size in kept],
        reload=[size / speed.to_device * speed.slowed_by for size in kept],
        copy_lanes=speed.num_lanes,
    )


def _end_of(timeline: Timeline, rank: int) -> float:
    """Return when a rank has run its last action, by the plan."""
    return max(event.end for event in timeline.events if event.rank == rank)


def _hidden_share(
    plan: Schedule, rank: int, costs: Costs, timeline: Timeline, seconds: float
) -> float | None:
    """Return the share of a rank's copies that a step did not take longer for; None: no copies."""
    events = timeline.events
    copies = [event for event in events if event.rank == rank and event.lane in ("d2h", "h2d")]
    taken = sum(event.end - event.start for event in copies)
    if not taken:
        return None
    ranks = ([action for action in actions if action.kind not in COPIES] for actions in plan)
    bare = simulate(Schedule.of(ranks, plan.name), costs)
    waited = max(0.0, seconds - _end_of(bare, rank))
    return max(0.0, 1 - waited / taken)


def _settings(config: DictConfig) -> PipelineSettings:
    strategy = config.strategy
    if strategy.schedule == "auto":
        raise ScheduleError(
            "schedule (auto) is chosen in a run, or by pipeoffload-plan schedule=auto; name the "
            "one to rehearse"
        )
    return PipelineSettings(
        schedule=strategy.schedule,
        num_microbatches=int(config.num_microbatches),
        num_chunks="auto" if config.num_chunks is None else int(config.num_chunks),
        blocks=strategy.get("blocks"),
        split=strategy.get("split", "auto"),
        offload=strategy.offload,
        recompute=strategy.recompute,
        memory_limit=strategy.memory_limit,
    )


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ScheduleError(f"device ({name}) is none: {error}") from None


def main() -> None:
    """Run the console script ``pipeoffload-rehearse``."""
    # As `python -m` has it: the module that a configuration names may lie in the current folder.
    sys.path.insert(0, str(Path.cwd()))
    run_hydra_app("rehearse", rehearse)


if __name__ == "__main__":
    main()

"""One rank of a pipeline, run alone: its stages are real, all else of the model is shapes.

The rank's offload and copies are real too; messages of the absent ranks arrive when the plan says,
delayed on the device's stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from rich.console import Console
from torch import Tensor, nn

from lightning_pipeoffload.cli.given_plan import write_costs
from lightning_pipeoffload.cli.model_probe import SEED, ModelProbe
from lightning_pipeoffload.cli.plan_output import print_json
from lightning_pipeoffload.cli.rehearsal import Rehearsal
from lightning_pipeoffload.cli.strategy_settings import settings_of
from lightning_pipeoffload.loop import StepCalls
from lightning_pipeoffload.planning.figures import bare_table
from lightning_pipeoffload.planning.limits import MachineLimits
from lightning_pipeoffload.planning.memory_needs import ON_DEVICE, MemoryNeeds
from lightning_pipeoffload.planning.run_plans import (
    make_plan_with_advice,
    rank_limits,
    request_for_run,
)
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.cut import CutSettings, materialize_slot
from lightning_pipeoffload.runtime.device import make_lanes
from lightning_pipeoffload.runtime.measure import CopySpeed, StageCosts, measure_copy_speed
from lightning_pipeoffload.runtime.run import ActivationMemory, Pipeline, split_into_microbatches
from lightning_pipeoffload.runtime.shapes import ShapeOnly, scales_of
from lightning_pipeoffload.runtime.step import Microbatch, sharing_casts
from lightning_pipeoffload.runtime.users_code import Slot
from lightning_pipeoffload.schedule import (
    COMPUTE_TIMES,
    COPIES,
    Costs,
    PlanRequest,
    Schedule,
    ScheduleError,
    Timeline,
    bytes_text,
    copy_ratios,
    device_indices,
    lower,
    seconds_text,
    share_text,
    simulate,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

_COUNTING = {
    *("schedule", "blocks", "split", "offload", "recompute", "memory_limit", "host_memory_limit"),
    *("compile", "gradient_accumulation_fusion"),
}
_OF_REPLICAS = (
    *("data_parallel_size", "sharding", "optimizer_offload", "master_weights", "optimizer_sync"),
)
_NO_OPTIMIZER = (
    "a rank that runs alone has no replicas, and its optimizer does not step: pipeoffload-plan "
    "counts it"
)
_DEVIATION = 0.02
_TIMES = (*COMPUTE_TIMES, "offload", "reload")


@dataclass(frozen=True)
class RehearsalResult:
    """The result of a rehearsal; the names are those of the JSON object.

    Attributes:
        stages: Costs of each of the rank's stages, by index; seconds and bytes.
        step_seconds: Seconds of a step of this rank.
        planned_seconds: The same by the plan.
        copy_ratio: Seconds of a stage's copies over those of its computing, the largest.
        hidden_share: The share of the copies' time that the step did not wait for; None: no copies.
        peak_bytes: The most that its activations took.
        planned_peak_bytes: The same by the plan.
        host_bytes: The most that was on the host.
        memory: The needs of the rank's device in all, by kind.
        limit_bytes: The most memory of its activations; None: no limit.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    rank: int
    stages: dict[int, dict[str, float]]
    step_seconds: float
    planned_seconds: float
    copy_ratio: float
    hidden_share: float | None
    peak_bytes: int
    planned_peak_bytes: int
    host_bytes: int
    memory: dict[str, int]
    limit_bytes: int | None

    @property
    def fits(self) -> bool:
        return self.limit_bytes is None or self.peak_bytes <= self.limit_bytes


class RehearsedModel(ModelProbe):
    """A model in which only one rank's stages have (random) values."""

    def make(
        self, schedule: Schedule, settings: PipelineSettings, rank: int, device: torch.device
    ) -> Pipeline:
        """Return one rank's part of the model, on a device.

        Raises:
            ValueError: The model cannot be cut so.
        """
        settings = self._with_run_cut(schedule.placement, settings)
        self._module = self._precision.convert_module(self._module)
        cut = CutSettings(
            schedule.placement,
            settings.blocks,
            settings.split,
            settings.recompute,
            compile=settings.compile,
            gradient_accumulation_fusion=settings.may_fuse(device),
        )
        self._device = device
        self._pipeline = pipeline = Pipeline(self._module, rank, cut, device)
        self._size = self.batch_size // schedule.num_microbatches
        first = self.cut(1)[0]  # of shapes, from which follows what this rank owns
        with self._precision.train_step_context():
            self.needs = MemoryNeeds.of(pipeline, first, self.optimizer_state_bytes(None))
        real_tensors: dict[int, Tensor] = {}
        for slot in pipeline.tensors.slots:
            if pipeline.tensors.is_local(slot.name) and isinstance(slot.tensor, ShapeOnly):
                _fill(slot, real_tensors)
        pipeline.prepare_new_cut(rank, cut)
        return pipeline

    def cut(self, count: int) -> Sequence[Microbatch]:
        """Return the microbatches of the first batch, repeated up to the given number."""
        batch: Any = move_data_to_device(self._batch, self._device)
        inputs = StepCalls(self._module, SEED).inputs("training_step", (batch, 0), {})
        with self._precision.train_step_context():
            slices = split_into_microbatches(
                self._pipeline, inputs.batch, self._size, inputs.step, inputs.kind, inputs.seed
            )
        return (slices * count)[:count]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Run steps in the trainer's precision."""
        with self._precision.train_step_context(), sharing_casts(self._device):
            yield


@torch.no_grad()
def _fill(slot: Slot, real_tensors: dict[int, Tensor]) -> None:
    """Fill a parameter with harmless values: matrices small, scales 1, the rest 0."""
    tensor = materialize_slot(slot, real_tensors)
    for scale in scales_of(tensor):
        scale.zero_()
    if not tensor.is_floating_point():
        tensor.zero_()
    elif tensor.dim() > 1:
        nn.init.normal_(tensor, std=_DEVIATION)
    else:
        nn.init.constant_(tensor, float(slot.attribute == "weight"))


def run_rank(config: DictConfig) -> None:
    """Run one rank as ``rehearse`` says."""
    num_ranks = config.num_ranks
    device = _device(config.device)
    settings = settings_of(config, _COUNTING, dict.fromkeys(_OF_REPLICAS, _NO_OPTIMIZER))
    settings.check_world(num_ranks)
    path = config.costs_file
    if path is not None and not (folder := Path(str(path)).parent).is_dir():
        raise ScheduleError(
            f"costs_file ({path}) cannot be written: make the folder {folder} first"
        )
    model = RehearsedModel(config)
    count = settings.choose_num_microbatches(num_ranks, model.batch_size)
    schedule = settings.make_schedule(num_ranks, count)
    pipeline = model.make(schedule, settings, config.rank, device)
    host = settings.host_budget(1, num_ranks, device_indices(schedule.placement)[config.rank])
    run = Rehearsal(pipeline, ActivationMemory.for_device(device, host), model.cut)
    try:
        with model.stepping():
            rehearsed, costs = _run(run, settings, schedule, model.needs, config.num_steps)
    finally:
        pipeline.detach()
    if config.format == "json":
        print_json({**asdict(rehearsed), "fits": rehearsed.fits})
    else:
        _print(rehearsed)
    if path is not None:
        write_costs(str(path), costs, num_ranks, schedule.num_stages)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ScheduleError(f"device ({name}) is no device of this torch: {error}") from None
    there = torch.accelerator.current_accelerator(check_available=True)
    if device.type not in ("cpu", there and there.type):
        raise ScheduleError(f"device ({name}) is not there; leave it out, or use device=cpu")
    return device


def _run(
    run: Rehearsal,
    settings: PipelineSettings,
    schedule: Schedule,
    needs: MemoryNeeds,
    num_steps: int,
) -> tuple[RehearsalResult, Costs]:
    """Measure the stages, plan with the measured costs, and run that plan."""
    rank, count = run.pipeline.rank, schedule.num_microbatches
    speed = measure_copy_speed(run.pipeline.device)
    measured = run.measure_stages(schedule, speed)
    costs = _costs_of_all(needs.costs, measured, speed, schedule.num_stages)
    request = PlanRequest(schedule.num_ranks, [settings.option(count)], lambda option: costs)
    plan = lower(make_plan_with_advice(request_for_run(settings, request)).schedule)
    run.memory.reset_peaks()
    run.memory.use_lanes(make_lanes(run.pipeline.device, costs.copy_lanes))
    seconds = run.run(plan, costs, num_steps)
    timeline = simulate(plan, costs)
    ledger, limits = run.memory.ledger, rank_limits(settings, MachineLimits(), plan.placement)
    needed = needs.needs_by_rank(plan)[rank]
    rehearsed = RehearsalResult(
        plan.name,
        plan.num_ranks,
        count,
        rank,
        {index: stage._asdict() for index, stage in measured.items()},
        seconds,
        _end_of(timeline, rank),
        max(copy_ratios(costs, plan.num_stages)),
        _hidden_share(plan, rank, costs, timeline, seconds),
        ledger.peak_device_bytes,
        int(timeline.peak_memory[rank]),
        ledger.peak_host_bytes,
        {name: getattr(needed, name) for name in ON_DEVICE},
        None if limits is None else int(limits.limits[rank]),
    )
    return rehearsed, costs


def _costs_of_all(
    shapes: Costs, measured: dict[int, StageCosts], speed: CopySpeed, num_stages: int
) -> Costs:
    """Return the costs of all stages: remote ones in proportion to their operations."""
    seconds: dict[str, Any] = {}
    for name in COMPUTE_TIMES:
        counted = shapes.per_stage(name, num_stages)
        counted_sum = sum(counted[stage] for stage in measured)
        unit = (
            sum(getattr(cost, name) for cost in measured.values()) / counted_sum
            if counted_sum
            else 0.0
        )
        local_seconds = {stage: getattr(cost, name) for stage, cost in measured.items()}
        seconds[name] = [
            local_seconds.get(stage, counted[stage] * unit) for stage in range(num_stages)
        ]
    sizes = shapes.per_stage("activation", num_stages)
    return replace(
        shapes,
        **seconds,
        offload=[size / speed.to_host * speed.copy_slowdown for size in sizes],
        reload=[size / speed.to_device * speed.copy_slowdown for size in sizes],
        copy_lanes=speed.num_lanes,
    )


def _end_of(timeline: Timeline, rank: int) -> float:
    """Return the end of a rank's last action, by the plan."""
    return max(event.end for event in timeline.events if event.rank == rank)


def _hidden_share(
    plan: Schedule, rank: int, costs: Costs, timeline: Timeline, seconds: float
) -> float | None:
    """Return the share of a rank's copies by which the step was not longer; None: no copies."""
    events = timeline.events
    copies = [event for event in events if event.rank == rank and event.lane in ("d2h", "h2d")]
    copy_seconds = sum(event.end - event.start for event in copies)
    if not copy_seconds:
        return None
    ranks = ([action for action in actions if action.kind not in COPIES] for actions in plan)
    bare = simulate(Schedule.of(ranks, plan.name), costs)
    waited = max(0.0, seconds - _end_of(bare, rank))
    return max(0.0, 1 - waited / copy_seconds)


def _print(rehearsed: RehearsalResult) -> None:
    sizes = (
        f"rank {rehearsed.rank} of {rehearsed.num_ranks}, {rehearsed.num_microbatches} microbatches"
    )
    headings = ("stage", "F", "B", "W", "offload", "reload", "activation")
    table = bare_table(*headings, title=f"{rehearsed.schedule}: {sizes}")
    for index, stage in rehearsed.stages.items():
        times = [seconds_text(stage[name]) for name in _TIMES]
        table.add_row(str(index), *times, bytes_text(stage["activation"]))
    console = Console()
    console.print(table)
    for line in _lines(rehearsed):
        console.print(line, highlight=False)


def _lines(rehearsed: RehearsalResult) -> list[str]:
    over = rehearsed.step_seconds / rehearsed.planned_seconds if rehearsed.planned_seconds else 1.0
    hidden = (
        ""
        if rehearsed.hidden_share is None
        else f", {share_text(rehearsed.hidden_share)} of copies hidden"
    )
    limit = "" if rehearsed.limit_bytes is None else f" of {bytes_text(rehearsed.limit_bytes)}"
    parts = ", ".join(
        f"{name} {bytes_text(size)}" for name, size in rehearsed.memory.items() if size
    )
    return [
        f"A step takes {seconds_text(rehearsed.step_seconds)}, {over:.3f} times what is planned.",
        f"k = {rehearsed.copy_ratio:.2f}{hidden}.",
        f"Activations took {bytes_text(rehearsed.peak_bytes)}{limit}, planned were "
        f"{bytes_text(rehearsed.planned_peak_bytes)}, and {bytes_text(rehearsed.host_bytes)} of "
        f"the host: {'it fits' if rehearsed.fits else 'it does not fit'}.",
        f"In all the rank needs {parts}.",
    ]

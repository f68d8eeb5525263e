"""One rank's run of a module: cuts batches, picks the plan that fits, executes it, reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from lightning_pipeoffload.accumulation import Accumulation, JoinedRun, join_batches
from lightning_pipeoffload.collectives import PipelineGroup
from lightning_pipeoffload.machine_limits import MachineLimits
from lightning_pipeoffload.memory_limit import device_limit
from lightning_pipeoffload.memory_plan import MemoryPlan, plan_before_measuring, plan_by_costs
from lightning_pipeoffload.report import (
    join_measurements,
    measure,
    predict,
    print_accumulation,
    print_measurement,
    print_offload,
    print_prediction,
)
from lightning_pipeoffload.runtime.activation_memory import ActivationMemory
from lightning_pipeoffload.runtime.copy_speed import CopySpeed, measure_copy_speed
from lightning_pipeoffload.runtime.executor import Executor
from lightning_pipeoffload.runtime.hop_speed import measure_hops
from lightning_pipeoffload.runtime.ledger import Ledger
from lightning_pipeoffload.runtime.measured_costs import RankCosts, join_costs, measure_costs
from lightning_pipeoffload.runtime.microbatch import (
    batch_size,
    checksum,
    merge_outputs,
    weigh_parts,
)
from lightning_pipeoffload.runtime.pipeline import CutSettings, Pipeline
from lightning_pipeoffload.runtime.stage_pass import Microbatch
from lightning_pipeoffload.runtime.streams import make_lanes
from lightning_pipeoffload.runtime.timing import ActionTimer
from lightning_pipeoffload.schedule import (
    Costs,
    JoinedPlan,
    OffloadReport,
    Schedule,
    forward_only,
    keep_microbatches,
    lower,
)
from lightning_pipeoffload.settings import PipelineSettings

# The first one allocates and warms caches; medians of three leave it out.
_STEPS_TO_MEASURE = 3
_NO_COPIES = CopySpeed(float("inf"), float("inf"), 1.0)


@dataclass(frozen=True)
class StepInputs:
    """One batch to run.

    Attributes:
        kind: of the step: "training_step", say.
        batch: any pytree.
        call: calls the user's step on a microbatch.
        seed: of the batch's random numbers.
    """

    kind: str
    batch: Any
    call: Callable[[Any], Any]
    seed: int


@dataclass(frozen=True)
class StepOutput:
    """What a batch gave on this rank.

    Attributes:
        value: what the user's steps returned, put together; None without the last stage.
        sizes: samples of each microbatch.
    """

    value: Any
    sizes: list[int]


class PipelineRun:
    """Batches of one module on one rank.

    Args:
        module: the user's.
        group: the pipeline's processes.
        settings: the strategy's.
        device: where this rank computes.
        num_local_ranks: ranks on this machine.

    Attributes:
        schedule: of a full training batch; until there is one, with a provisional number of
            microbatches.
        costs_at_end: what the stages of all ranks cost, once training has ended; None before.
    """

    def __init__(
        self,
        module: nn.Module,
        group: PipelineGroup,
        settings: PipelineSettings,
        device: torch.device,
        num_local_ranks: int = 1,
    ) -> None:
        cut = CutSettings(group.stage_ranks, settings.blocks, settings.split, settings.recompute)
        self.pipeline = Pipeline(module, group.rank, cut, device)
        self.executor = Executor(
            group.rank,
            self.pipeline.stages,
            group.transport,
            ActionTimer(device),
            ActivationMemory.on(device, settings.host_budget(num_local_ranks)),
        )
        self.schedule = settings.provisional_schedule(group.num_ranks)
        self._group = group
        self._settings = settings
        self._size: int | None = None
        self._plan = cache(_make_plan)
        self._joined: dict[int, JoinedPlan | None] = {}
        self._in_use: JoinedPlan | None = None
        self._open: JoinedRun | None = None
        self._costs: Costs | None = None
        self._hops: dict[int, float] = {}
        self._on_accelerator = device.type != "cpu"
        self._limits = MachineLimits()
        self._offloaded: OffloadReport | None = None
        self._measured: dict[str, list[Any]] | None = None
        self.costs_at_end: Costs | None = None

    @property
    def plan(self) -> Schedule:
        """The lowered plan of a full training batch, or of several that accumulate."""
        return self._in_use.plan if self._in_use else self._plan_of_batch

    @property
    def _plan_of_batch(self) -> Schedule:
        return self._plan(self.schedule, self.schedule.num_microbatches, training=True)

    @property
    def is_on_last_stage(self) -> bool:
        """Whether the last stage is running right now."""
        action = self.executor.current
        return action is not None and action.stage == self.schedule.num_stages - 1

    @property
    def place(self) -> str:
        """Where in the plan this rank is: "stage 3, B of microbatch 5"; empty between steps."""
        action = self.executor.current
        if action is None:
            return ""
        return f"stage {action.stage}, {action.kind.value} of microbatch {action.microbatch}"

    def cut_training_batch(self, inputs: StepInputs) -> list[Microbatch]:
        """Cut a batch into microbatches of the first batch's size; a shorter one into fewer.

        Raises:
            ValueError: the first batch cannot be cut, or the step not at its blocks.
        """
        total = batch_size(inputs.batch)
        if self._size is None:
            count = self._settings.choose_num_microbatches(self._group.num_ranks, total)
            self.schedule, self._offloaded = self._make_schedule(count)
            self._size = total // count
        return self._cut(inputs, max(self._size, self._smallest_size(total)))

    def train(
        self,
        inputs: StepInputs,
        microbatches: list[Microbatch],
        accumulation: Accumulation,
        before_backward: Callable[[], None],
    ) -> StepOutput:
        """Run all forwards of a batch, and its backwards now or with the batches that follow.

        Args:
            inputs: the batch.
            microbatches: of it.
            accumulation: whose gradients its own are added to.
            before_backward: called before the first backward, or at the end.
        """
        self._open_plan(accumulation)
        if self._open is None:
            plan = self._plan(self.schedule, len(microbatches), training=True)
            execute = partial(self.executor.run, plan, microbatches, before_backward)
        else:
            execute = partial(self._open.run, microbatches, before_backward)
        output = self._run(inputs, microbatches, accumulation.num_batches, execute)
        if accumulation.is_last:
            self.finish_plan()
        return output

    def _open_plan(self, accumulation: Accumulation) -> None:
        """Go on with the plan that is open, or choose the one to begin with."""
        if self._open is not None and (accumulation.is_first or self._open.is_full):
            self.finish_plan()
        if self._open is not None:
            return
        if self._costs is None and self.executor.timer.num_steps == _STEPS_TO_MEASURE:
            self._plan_by_measurement()
        self._choose_plan(accumulation)
        if self._in_use is not None and not accumulation.is_last:
            self._open = JoinedRun(self._in_use, self.schedule.num_microbatches, self.executor)

    def _choose_plan(self, accumulation: Accumulation) -> None:
        watched = bool(accumulation.watched_by)
        self._in_use = None if watched else self._join(accumulation.num_batches)

    def finish_plan(self) -> None:
        """Run the backwards that are left of batches that accumulate."""
        if self._open is not None:
            open_plan, self._open = self._open, None
            open_plan.finish()

    def _join(self, num_batches: int) -> JoinedPlan | None:
        if num_batches not in self._joined:
            costs = self._costs or self.pipeline.costs
            self._joined[num_batches] = join_batches(
                lambda count: self._make_schedule(count)[0], self.schedule, num_batches, costs
            )
        return self._joined[num_batches]

    def _make_schedule(self, count: int) -> MemoryPlan:
        sizes = self._group.num_ranks, count
        if self._costs is None:
            return plan_before_measuring(self._settings, *sizes, self._on_accelerator)
        return plan_by_costs(self._settings, *sizes, self._costs, self._limits)

    def _plan_by_measurement(self) -> None:
        """Make the plan anew with what the first steps cost, and measure that one from now on.

        The ranks wait for each other here, once.
        """
        if not (self._settings.plans_memory(self._on_accelerator) or self.schedule.has_copies):
            return
        self._hops = measure_hops(self.executor, self.schedule, self.pipeline.device)
        self._costs = join_costs(self._group.gather(self._measure_costs()))
        self._limits = self._gather_limits()
        self.schedule, self._offloaded = self._make_schedule(self.schedule.num_microbatches)
        self._joined.clear()
        self.executor.timer = ActionTimer(self.pipeline.device)
        self.executor.memory.ledger = Ledger()
        lanes = make_lanes(self.pipeline.device, self._costs.copy_lanes)
        self.executor.memory.use_lanes(lanes)
        if self._group.is_root:
            print_offload(self.report(), self._limits.device)

    def _gather_limits(self) -> MachineLimits:
        """Say what the devices and hosts of all ranks have, as far as the plan is to heed it."""
        memory = self.executor.memory
        left = device_limit(self.pipeline.device, memory.ledger.peak_device_bytes)
        budget = memory.settings.host.budget
        ranks = self._group.gather((left, budget))
        heeded = self._settings.keeps_device_limit(self._on_accelerator)
        device = min(left for left, _ in ranks) if heeded else None
        return MachineLimits(device, [budget for _, budget in ranks])

    def evaluate(self, inputs: StepInputs) -> StepOutput:
        """Run the forwards of a batch of any size, in no more microbatches than in training."""
        microbatches = self._cut(inputs, self._smallest_size(batch_size(inputs.batch)))
        plan = self._plan(self.schedule, len(microbatches), training=False)
        return self._run(inputs, microbatches, 1, partial(self.executor.run, plan, microbatches))

    def _run(
        self,
        inputs: StepInputs,
        microbatches: list[Microbatch],
        accumulated: int,
        execute: Callable[[], list[Any]],
    ) -> StepOutput:
        finish_comparing = self._group.start_comparing(checksum(inputs.batch))
        sizes = [batch_size(microbatch.part) for microbatch in microbatches]
        shares = self._weigh(microbatches, sizes, accumulated)
        results = execute()
        finish_comparing(f"batch in {inputs.kind}")
        return StepOutput(merge_outputs(results, shares) if results else None, sizes)

    def _weigh(
        self, microbatches: list[Microbatch], sizes: list[int], accumulated: int
    ) -> list[float]:
        """Set each microbatch's weight in the gradient; return its share of the batch's loss."""
        weigh = self._settings.microbatch_weight
        weights: list[float] = list(sizes)
        if callable(weigh):
            weights = weigh_parts(weigh, [microbatch.part for microbatch in microbatches])
        shares = [weight / sum(weights) for weight in weights]
        for microbatch, share in zip(microbatches, shares, strict=True):
            microbatch.weight = share / accumulated
        return shares

    def _smallest_size(self, total: int) -> int:
        return -(-total // self.schedule.num_microbatches)

    def _cut(self, inputs: StepInputs, size: int) -> list[Microbatch]:
        return self.pipeline.make_microbatches(
            inputs.batch, size, inputs.call, inputs.kind, inputs.seed
        )

    def begin_training(self, accumulation: Accumulation) -> None:
        """Agree on what several ranks own, and say what is going to run.

        Args:
            accumulation: of the first batch.
        """
        self._group.share(self.pipeline)
        self._choose_plan(accumulation)
        if self._group.is_root:
            print_prediction(self.report())
            print_accumulation(self._plan_of_batch, self.plan, accumulation)

    def report(self) -> dict[str, Any]:
        """Describe the pipeline; see ``PipeOffloadStrategy.report``.

        Raises:
            RuntimeError: before the first batch, which decides how the module is cut.
        """
        if not self.pipeline.stages:
            raise RuntimeError("there is nothing to report before the first batch")
        report = predict(self.plan, self.pipeline, self._costs)
        if self._offloaded is not None:
            report["offload"] = asdict(self._offloaded)
        if self._measured is not None:
            report["measured"] = self._measured
        elif self.executor.timer.num_steps:
            mine = self._measure()
            missing = dict.fromkeys(mine)
            ranks = range(self._group.num_ranks)
            parts = [mine if rank == self._group.rank else missing for rank in ranks]
            report["measured"] = join_measurements(parts)
        return report

    def end_training(self) -> None:
        """Bring the measurements of all ranks together, and print them."""
        if not self.executor.timer.num_steps:
            return
        ranks = self._group.gather((self._measure(), self._measure_costs()))
        self._measured = join_measurements([measured for measured, _ in ranks])
        self.costs_at_end = join_costs(costs for _, costs in ranks)
        if self._group.is_root:
            print_measurement(self.report())

    def _measure_costs(self) -> RankCosts:
        copies = self._settings.plans_memory(self._on_accelerator) or self.schedule.has_copies
        speed = measure_copy_speed(self.pipeline.device) if copies else _NO_COPIES
        return measure_costs(self.executor, speed, self._hops)

    def leave(self) -> None:
        """Leave the module, after an error in the middle of a step too."""
        self._open = None
        self.pipeline.detach()

    def _measure(self) -> dict[str, Any]:
        return measure(self.executor, self.pipeline.weight_flops)


def _make_plan(schedule: Schedule, count: int, training: bool) -> Schedule:
    kept = keep_microbatches(schedule, count) if count < schedule.num_microbatches else schedule
    return lower(kept if training else forward_only(kept))

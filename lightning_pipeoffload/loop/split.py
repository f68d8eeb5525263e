"""A module that is cut over the ranks, and all that lives as long as its cut.

It is made at a trainer's first entry with a module, and serves the fits and evaluations that follow
with the same one::

    Split   pipeline    this rank's stages        plans       the plan, and its replacement
            executor    runs their actions        parameters  optimizers' parameters, by rank
            cutter      cuts batches              state       checkpoints' view of module and them
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipeoffload.checkpoints import SplitState
from lightning_pipeoffload.loop.batch_cutter import BatchCutter
from lightning_pipeoffload.loop.compilation import compile_ahead
from lightning_pipeoffload.loop.microbatches import MicrobatchWeights
from lightning_pipeoffload.loop.plans import Plans
from lightning_pipeoffload.loop.report import Report
from lightning_pipeoffload.loop.step_calls import StepInputs
from lightning_pipeoffload.optimizers import MasterWeights, OptimizedParameters
from lightning_pipeoffload.planning.measurements import Measurements
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.comm import PersistentBuffers, PipelineGroup
from lightning_pipeoffload.runtime.device import ActionTimer
from lightning_pipeoffload.runtime.making import PartedModule
from lightning_pipeoffload.runtime.run import (
    ActivationMemory,
    Executor,
    GradientReduction,
    Pipeline,
)
from lightning_pipeoffload.runtime.step import Microbatch
from lightning_pipeoffload.runtime.whole import WholeRuns
from lightning_pipeoffload.schedule import Schedule


class Split:
    """The split of one module.

    Args:
        module: The user's module.
        group: The run's processes.
        settings: The strategy's settings.
        device: This rank's device.
        num_local_ranks: The ranks of this machine, which share its memory.
        parts: The module, if it was made in parts.
        masters: The masters of parameters; None: there are none.
        optimizers: Returns the optimizers.

    Attributes:
        pipeline: This rank's part of the module.
        executor: Runs this rank's actions.
        cutter: Cuts its batches.
        whole_runs: Runs that are not cut, of steps and in hooks.
        measurements: What the actions cost.
        plans: Makes the plans.
        report: Describes the run.
        loss_weights: Each microbatch's share of its batch.
        parameters: The optimizers' parameters.
        state: The module and the optimizers as checkpoints have them.
        reduction: Averages gradients over the replicas; None where there is one.
        runs_whole: Whether evaluation batches run whole on every rank, by kind of step and shapes.
        generating: The kinds of steps that went through their blocks again and again.
    """

    def __init__(
        self,
        module: nn.Module,
        group: PipelineGroup,
        settings: PipelineSettings,
        device: torch.device,
        num_local_ranks: int,
        parts: PartedModule | None,
        masters: MasterWeights | None,
        optimizers: Callable[[], list[Optimizer]],
    ) -> None:
        if settings.chooses_schedule:  # a run before this one may have chosen another placement
            group.assign_stages(settings.provisional_schedule(group.num_ranks))
        cut = settings.cut_settings(group)
        cut = cut if parts is None else replace(cut, split=parts.counts)
        self.group, self.masters = group, masters
        self.pipeline = Pipeline(
            module, group.rank, cut, device, parts, group, self._wait_for_parameters
        )
        self.executor = Executor(
            group.rank,
            self.pipeline.stages,
            group.transport,
            ActionTimer(device),
            ActivationMemory.for_device(
                device, settings.host_budget(num_local_ranks, group.num_ranks, group.device_place)
            ),
            group.replicas.pending if group.num_replicas > 1 else None,
        )
        self.parameters = OptimizedParameters(
            self.pipeline,
            optimizers,
            settings.num_optimizer_shards(group.num_replicas),
            settings.per_parameter_optimizer,
            settings.optimizer_offload,
            masters,
        )
        is_divided = settings.num_optimizer_shards(group.num_replicas) > 1
        self.pipeline.gradients.set_owners(self.parameters.updating_replica if is_divided else None)
        seconds = self.parameters.host_step_seconds
        self.whole_runs = WholeRuns(self.pipeline)
        self.measurements = Measurements(self.executor, self.pipeline, seconds, self.whole_runs)
        self.plans = Plans(settings, self.pipeline, self.executor, self.measurements)
        self.loss_weights = MicrobatchWeights(module, settings.microbatch_weight)
        self.cutter = BatchCutter(self.pipeline, settings, self.plans, self.loss_weights)
        self.report = Report(self.pipeline, self.plans, self.measurements, self.cutter)
        self.reduction: GradientReduction | None = None
        self.runs_whole: dict[Hashable, bool] = {}
        self.generating: set[str] = set()
        self.state = SplitState(self.pipeline, self.parameters, masters)

    def _wait_for_parameters(self) -> None:
        """Wait for all weights of this rank, before a trace."""
        if self.plans.boundary is not None:
            self.plans.boundary.wait_for_parameters()

    @property
    def plan(self) -> Schedule:
        """The lowered plan of a full training batch."""
        return self.plans.training.plan

    @property
    def running_action(self) -> str:
        """The action that runs: "stage 3, B of microbatch 5"; empty between steps."""
        action = self.executor.current
        if action is None:
            return ""
        replica = f"replica {self.group.replica}, " if self.group.num_replicas > 1 else ""
        num_slices = self.executor.plan.num_sequence_slices
        microbatch, part = divmod(action.microbatch, num_slices)
        of_slice = f"slice {part} of " if num_slices > 1 else ""
        kind = action.kind.value
        return f"{replica}stage {action.stage}, {kind} of {of_slice}microbatch {microbatch}"

    def narrow_optimizers(self) -> None:
        """Narrow new optimizers to this rank's parameters."""
        self.parameters.narrow_steps()
        if self.state.is_split:  # by a fit before this one
            self.parameters.drop_remote_states()

    # The shares of microbatches in a batch

    def sizes_and_shares(
        self, inputs: StepInputs, microbatches: list[Microbatch]
    ) -> tuple[list[int], Sequence[Any]]:
        """Return the samples of a batch's microbatches, and their shares in its means."""
        sizes = [each.num_samples for each in microbatches]
        is_packed = self.cutter.packs_rows(inputs.kind)
        return sizes, self.loss_weights.shares(
            [each.part for each in microbatches], sizes, is_packed
        )

    def replica_loss_factor(self) -> Any:
        """Return the factor for this replica's loss: its number of labels over the replicas' mean.

        Gradients are averaged over replicas, so without it a replica with few labels would count as
        much as one with many. All replicas call it, after :meth:`sizes_and_shares`; it is 1 for
        batches that are not of packed rows.
        """
        if self.group.num_replicas == 1 or not self.cutter.packs_rows("training_step"):
            return 1.0
        total, device = self.loss_weights.total, self.group.device
        num_labels = torch.as_tensor(total, dtype=torch.float64, device=device)
        of_all = self.group.replicas.gather_tensor(num_labels, differentiable=False)
        return num_labels * len(of_all) / of_all.sum()

    # From the first training batch to the end

    def prepare_first_batch(self, first: Microbatch, num_accumulated: int) -> None:
        """In the first batch, synchronize shared parameters and print the plan."""
        self.whole_runs.drop_layout()
        self.group.replicas.broadcast_from_first(self.pipeline.tensors.distinct(), "weights")
        self.pipeline.gradients.broadcast_shared(self.pipeline.tensors, self.pipeline.records)
        if self.group.num_replicas > 1:
            parameters = self.pipeline.tensors.parameters_with_local_stages()
            of_stages = self.pipeline.stage_gradients
            replicas = self.group.replicas
            updating_replica = self.pipeline.gradients.updating_replica
            buffers = PersistentBuffers(replicas, self.pipeline.tensors)
            self.reduction = GradientReduction(
                replicas, parameters, of_stages, updating_replica, buffers
            )
        self.plans.plan_first_step()
        self.report.print_initial_plan(num_accumulated)
        compile_ahead(self.pipeline, first.record)

    def finish_reduction(self, reduction: GradientReduction) -> None:
        """Wait for the gradients' means over the replicas."""
        reduction.wait()
        self.pipeline.gradients.mark_gradients_reduced()

    def leave(self) -> None:
        """Leave the module until the next entry, after an error in the middle of a step too."""
        self.plans.leave()
        if self.reduction is not None:
            self.reduction.abandon()
        self.pipeline.gradients.drop_remote_gradients()
        self.group.replicas.pending.forget()
        self.loss_weights.forget()
        self.cutter.forget_loaders()
        self.whole_runs.drop_layout()
        self.pipeline.detach()

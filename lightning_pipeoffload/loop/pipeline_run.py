"""Batches of one module on one rank: cut into microbatches, compared, and run by a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_pipeoffload.loop.auto_choice import compile_ahead
from lightning_pipeoffload.loop.backward import BatchBackward
from lightning_pipeoffload.loop.batch_cutter import BatchCutter
from lightning_pipeoffload.loop.microbatches import MicrobatchWeights, least_samples
from lightning_pipeoffload.loop.run_plans import RunPlans
from lightning_pipeoffload.loop.step_boundary import StepBoundary
from lightning_pipeoffload.loop.step_calls import StepInputs, StepOutput
from lightning_pipeoffload.loop.step_exchange import StepExchange
from lightning_pipeoffload.optimizers.host_step import EarlyStep
from lightning_pipeoffload.planning.measurements import Measurements
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.planning.training_plan import Accumulation
from lightning_pipeoffload.runtime.batch_structure import BatchParts, batch_size
from lightning_pipeoffload.runtime.executor import Executor, Settle
from lightning_pipeoffload.runtime.gradient_reduction import GradientReduction
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.making.parted_module import PartedModule
from lightning_pipeoffload.runtime.microbatch import merge_outputs, shape_signature
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.rank_memory import ActivationMemory
from lightning_pipeoffload.runtime.replicas import SavedBuffers
from lightning_pipeoffload.runtime.step.microbatch import Microbatch, placed
from lightning_pipeoffload.runtime.timing import ActionTimer
from lightning_pipeoffload.runtime.users_code.attributes import GlobalWriteError
from lightning_pipeoffload.runtime.users_code.step_call import StepCall
from lightning_pipeoffload.schedule import Schedule

log = logging.getLogger(__name__)

_WHOLE = "%s runs as a whole on every rank, to which each block is lent while it runs: %s"


class PipelineRun:
    """Cuts and runs the batches of one module; made once for the fits of a trainer with it.

    Attributes:
        pipeline: This rank's part of the module.
        executor: Runs this rank's actions.
        cutter: Cuts its batches.
        exchange: Compares the batches with the other ranks'; another one for each fit.
        measurements: What those actions cost.
        plans: Makes the plans.
        report: Describes the run.
        reduction: Averages gradients over the replicas; None where there is one.
    """

    exchange: StepExchange

    def __init__(
        self,
        module: nn.Module,
        group: PipelineGroup,
        settings: PipelineSettings,
        device: torch.device,
        num_local_ranks: int = 1,
        parts: PartedModule | None = None,
    ) -> None:
        if settings.is_chosen:  # a run before this one may have chosen another placement
            group.place(settings.provisional_schedule(group.num_ranks))
        cut = settings.cut_settings(group)
        cut = cut if parts is None else replace(cut, split=parts.counts)
        self._group = group
        self.pipeline = Pipeline(module, group.rank, cut, device, parts)
        self.executor = Executor(
            group.rank,
            self.pipeline.stages,
            group.transport,
            ActionTimer(device),
            ActivationMemory.on(device, settings.host_budget(num_local_ranks)),
            group.replicas.pending,
        )
        self.measurements = Measurements(self.executor, self.pipeline, group)
        self.cutter = BatchCutter(self.pipeline, settings)
        self.plans = RunPlans(
            settings, self.pipeline, self.executor, group, self.measurements, self.cutter
        )
        self._training, self.report = self.plans.training, self.plans.report
        self._weights = MicrobatchWeights(module, settings.microbatch_weight)
        self._runs_whole: dict[Hashable, bool] = {}
        self._has_sent = True  # what training steps have written
        self._cuts_predictions: dict[int, bool] = {}  # of each loader
        self.reduction: GradientReduction | None = None

    @property
    def plan(self) -> Schedule:
        """The lowered plan of a full training batch."""
        return self._training.plan

    @property
    def place(self) -> str:
        """The action that runs: "stage 3, B of microbatch 5"; empty between steps."""
        action = self.executor.current
        if action is None:
            return ""
        replica = f"replica {self._group.replica}, " if self._group.num_replicas > 1 else ""
        kind, microbatch = action.kind.value, action.microbatch
        return f"{replica}stage {action.stage}, {kind} of microbatch {microbatch}"

    def join(self, exchange: StepExchange, boundary: StepBoundary) -> None:
        """Begin a fit or an evaluation."""
        self.exchange = exchange
        self.plans.boundary = self.report.boundary = boundary

    def cut_training_batch(self, inputs: StepInputs) -> list[Microbatch]:
        """Cut a batch into slices of the first batch's size; a shorter one into fewer.

        Raises:
            ValueError: The batch has no samples, or it or the step cannot be cut.
        """
        is_first = not self.report.size
        slices = self._cut_by_user(inputs) if self.cutter.by_user else self._cut_by_size(inputs)
        if is_first and self._group.reports:
            self._weights.note_class_weights(slices)
        return slices

    def _cut_by_size(self, inputs: StepInputs) -> list[Microbatch]:
        total = self.cutter.count(inputs)
        if not total:
            raise ValueError(
                f"{inputs.kind} got a batch without samples, which makes no microbatch; leave it "
                f"out where batches are made (batch_sampler, collate_fn, or the dataset)"
            )
        if not self.report.size:
            first = self.cutter.count_first(total)
            self.report.size = first // self.plans.choose(inputs, first)
            if self.report.size < total and self._group.reports:
                self._weights.note_ignored_labels(inputs.batch)
        size = max(self.report.size, self._smallest_size(total))
        if total % size == 1 < total and least_samples(self.pipeline.module) > 1:
            # The last one would have no statistics.
            size = next(more for more in range(size, total + 1) if total % more != 1)
        parts = self.cutter.split(inputs, size)
        try:
            return self.cutter.trace(inputs, parts)
        except Exception as error:
            if size < total:
                self._blame_cutting(error, inputs, total, size)
            raise

    def _cut_by_user(self, inputs: StepInputs) -> list[Microbatch]:
        is_first = not self.report.size
        if is_first:
            self.plans.choose(inputs)
        cut = self._make_parts(inputs, may_be_fewer=not is_first)
        if is_first:
            self.report.size = -(-sum(cut.sizes) // len(cut.parts))
            if self._group.reports:
                self._weights.note_ignored_labels(inputs.batch)
        return self.cutter.trace(inputs, cut)

    def _make_parts(self, inputs: StepInputs, may_be_fewer: bool = True) -> BatchParts:
        count = self._training.schedule.num_microbatches
        return self.cutter.make_parts(inputs, count, may_be_fewer)

    def _blame_cutting(self, error: Exception, inputs: StepInputs, total: int, size: int) -> None:
        """Raise an error that says so where the step fails only with a microbatch."""
        try:
            self.cutter.cut(inputs, total)
        except Exception:
            return  # the first error counts, which is the caller's
        raise ValueError(
            f"{inputs.kind} fails with a microbatch, and not with the whole batch of {total} "
            f"samples that was cut into {-(-total // size)}: {type(error).__name__}: {error}; set "
            f"a smaller num_microbatches or a larger batch_size, or leave out a short last batch "
            f"with drop_last=True"
        ) from error

    def train(
        self,
        inputs: StepInputs,
        slices: list[Microbatch],
        accumulation: Accumulation,
        backward: BatchBackward,
        settle: Settle | None,
        early_step: EarlyStep | None = None,
    ) -> StepOutput:
        """Run a batch that was cut.

        Args:
            inputs: The batch.
            slices: Its slices.
            accumulation: The batches whose gradients its own are added to.
            backward: Starts the backwards.
            settle: Waits for final weights; None: they are final.
            early_step: Steps parameters on the host as their gradients become final; not where
                replicas average them first.
        """
        self._has_sent = False
        self._training.expect(self.pipeline.is_new, self.pipeline.costs)
        self.plans.before_plan(accumulation.is_first)
        sizes, shares = self._begin(inputs, slices)
        weights = [share / accumulation.num_batches for share in shares]
        results = self.executor.run(
            self._training.of_training(len(slices), accumulation.is_last),
            placed(slices, weights, backward.differentiate),
            backward.start,
            settle,
            (self.reduction or early_step) if accumulation.is_last else None,
        )
        return _step_output(results, sizes, shares)

    def finish_reduction(self) -> None:
        """Wait for the gradients' means over the replicas, where there are several."""
        if self.reduction is not None:
            self.reduction.wait()
            self._buffers.copy_first()

    def evaluate(self, inputs: StepInputs, send_written: Callable[[], None]) -> StepOutput:
        """Run the forwards of a batch of any size, in no more microbatches than in training.

        Args:
            inputs: The batch.
            send_written: Sends to all ranks the attributes that training steps wrote on some, for a
                step that runs whole on each.
        """
        key = inputs.kind, shape_signature(inputs.batch)
        is_open = not self._runs_whole.get(key)
        slices = self._cut_evaluation(inputs, key) if is_open else None
        if slices is None or self._runs_whole[key]:
            if not self._has_sent:
                self._has_sent = True
                send_written()
            done, could_be_cut = self._evaluate_whole(inputs, slices)
            if is_open and self._runs_whole[key]:
                stays_whole = slices is None or not could_be_cut
                self._runs_whole[key] = self._group.agree(stays_whole, unanimous=False)
        else:
            self._training.expect(self.pipeline.is_new, self.pipeline.costs)
            sizes, shares = self._begin(inputs, slices)
            plan = self._training.of_evaluation(len(slices))
            results = self.executor.run(plan, placed(slices))
            self.exchange.turn()
            done = _step_output(results, sizes, shares)
        return done

    def _cut_evaluation(self, inputs: StepInputs, key: Hashable) -> list[Microbatch] | None:
        """Cut a batch, and decide whether batches of its key run in slices; None: not cut."""
        slices, obstacle = None, ""
        given = self._make_parts(inputs) if self.cutter.by_user else None
        try:
            if given is None:
                slices = self._slice_evaluation(inputs)
            else:
                slices = self.cutter.trace(inputs, given)
        except GlobalWriteError:
            raise
        except Exception as error:  # an error of the user's comes again in the whole step
            obstacle = str(error)
        if key not in self._runs_whole:
            is_certain = slices is not None and all(cut.record.is_certain for cut in slices)
            of_ranks = self._group.gather((is_certain, slices is None))
            self._runs_whole[key] = not all(certain for certain, _ in of_ranks)
            if any(is_uncut for _, is_uncut in of_ranks):
                slices = None  # blocks are lent to all ranks for as many slices
            if obstacle and self._group.reports:
                log.info(_WHOLE, inputs.kind, obstacle)
        return slices

    def _slice_evaluation(self, inputs: StepInputs) -> list[Microbatch]:
        total = self.cutter.count(inputs)
        size = self._smallest_size(total)
        if inputs.kind != "predict_step" or size == total:
            return self.cutter.cut(inputs, size)
        if inputs.loader not in self._cuts_predictions:
            # A number may count samples, so a batch's predictions need a row for each to be cut.
            (whole,) = self.cutter.cut(inputs, total)
            counts = whole.record.result_counts
            self._cuts_predictions[inputs.loader] = counts is None or total in counts
        return self.cutter.cut(inputs, size if self._cuts_predictions[inputs.loader] else total)

    def _evaluate_whole(
        self, inputs: StepInputs, slices: list[Microbatch] | None
    ) -> tuple[StepOutput, bool]:
        """Run a step on every rank alike, to which each block is lent while it runs.

        Where it may turn out that the step can be cut, it runs by slices, for the same bits.

        Returns:
            The outcome, and whether the step could be cut.
        """
        self.exchange.note(inputs.batch, f"batch in {inputs.kind}")
        call = StepCall(is_last=self._group.is_root, is_last_local=True)
        cuts = [(cut.part, cut.seed) for cut in slices or ()] or [(inputs.batch, inputs.seed)]
        values, could_be_cut = [], True
        for part, seed in cuts:
            lending = self.pipeline.lending(self._group.send_to_all, seed)
            with lending.running():
                values.append(inputs.step(part, call))
            could_be_cut &= lending.could_be_cut
        self.exchange.turn()
        parts = [part for part, _ in cuts]
        sizes = [cut.num_samples for cut in slices] if slices else [_size_of(inputs.batch)]
        shares = self._weights.shares(parts, sizes) if slices else [1.0]
        if not self._group.is_root:
            return StepOutput(None, sizes, shares), could_be_cut
        whole = values[0] if len(values) == 1 else merge_outputs(values, shares, sizes)
        return StepOutput(whole, sizes, shares), could_be_cut

    def _begin(
        self, inputs: StepInputs, slices: list[Microbatch]
    ) -> tuple[list[int], Sequence[Any]]:
        """Compare the batch with the other ranks'; return each slice's samples and its share."""
        self.exchange.note(inputs.batch, f"batch in {inputs.kind}")
        parts = [cut.part for cut in slices]
        sizes = [cut.num_samples for cut in slices]
        return sizes, self._weights.shares(parts, sizes)

    def check_weights(self) -> None:
        """Check the user's weights of the last batch's microbatches; raises a ValueError."""
        self._weights.check()

    def _smallest_size(self, total: int) -> int:
        return -(-total // self._training.schedule.num_microbatches)

    def begin_training(self, accumulation: Accumulation) -> None:
        """In the first batch, synchronize shared parameters and print the plan."""
        self._group.replicas.copy_first(self.pipeline.tensors.own())
        self._group.share(self.pipeline)
        if self._group.num_replicas > 1:
            parameters = self.pipeline.tensors.with_local_stages()
            gradients = self.pipeline.stage_gradients
            self.reduction = GradientReduction(self._group.replicas, parameters, gradients)
        self._buffers = SavedBuffers(self._group.replicas, self.pipeline.ownership)
        self.plans.begin()
        self.report.print_start(accumulation.num_batches)
        compile_ahead(self.pipeline, self._group)

    def leave(self) -> None:
        """Leave the module, after an error in the middle of a step too."""
        self.plans.leave()
        if self.reduction is not None:
            self.reduction.abandon()
        self._group.replicas.pending.forget()
        self._cuts_predictions.clear()
        self._weights.forget()
        self.pipeline.detach()


def _step_output(results: list[Any], sizes: list[int], shares: Sequence[Any]) -> StepOutput:
    value = merge_outputs(results, shares, sizes) if results else None
    return StepOutput(value, sizes, shares)


def _size_of(batch: Any) -> int:
    """Return the number of samples; 1 of what has no dimension of them."""
    try:
        return batch_size(batch)
    except ValueError:
        return 1

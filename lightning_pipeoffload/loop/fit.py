"""One entry of the Trainer on one rank: a fit, a validation, a test or a prediction.

A training batch, in the order of the calls; ``batch_end.py`` goes on where this ends::

    strategy.optimizer_step  StepBoundary       pending weights are watched no more
      the closure: Lightning runs training_step within the optimizer's step (run_backward_in_step)
        Fit.train            StepCalls.inputs, BatchCutter.cut_training_batch
                             Fit._run           the plan, measured anew; the executor: F, B, W
                             LogCapture         each name that steps have logged, once
                             BatchBackward      sums over ranks, on_after_backward
        GradientClipper      clipping, the loss scale
      the update             NarrowedOptimizer  of this rank's parameters only
                             StepBoundary       pending weights are watched from now on
    LoopPatches._end_batch   in place of what ends a batch in Lightning's logger connector
      BatchEndExchange       one vector to all ranks, and that of the batch before: options alike,
                             stop, another plan
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from operator import attrgetter
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from torchmetrics import Metric

from lightning_pipeoffload.checkpoints import ResumeState
from lightning_pipeoffload.loop.backward import BatchBackward, GradientClipper
from lightning_pipeoffload.loop.batch_end import BatchEndExchange
from lightning_pipeoffload.loop.data import FirstBatches, silenced
from lightning_pipeoffload.loop.evaluation import Evaluation
from lightning_pipeoffload.loop.exchange import Exchange
from lightning_pipeoffload.loop.hooks import (
    BEFORE_STEPS,
    CollectedValues,
    HookForwards,
    hooks_between_batches,
    numbers_in,
    users_hooks,
)
from lightning_pipeoffload.loop.lightning_patches import (
    LoopPatches,
    clipping_across_stages,
    filtering_by_identity,
    install_shared_metrics,
)
from lightning_pipeoffload.loop.model_in_parts import PartedModuleBuilder
from lightning_pipeoffload.loop.packed_row_checks import PackedRowCheck
from lightning_pipeoffload.loop.reading import BatchDistributor
from lightning_pipeoffload.loop.split import Split
from lightning_pipeoffload.loop.step_boundary import StepBoundary
from lightning_pipeoffload.loop.step_calls import StepCalls, StepInputs, StepOutput
from lightning_pipeoffload.loop.weight_readers import check_hooks_reading_weights
from lightning_pipeoffload.metrics import ReplicaMetricSync
from lightning_pipeoffload.optimizers import EarlyStep
from lightning_pipeoffload.planning.training_plan import Accumulation
from lightning_pipeoffload.processes import Processes
from lightning_pipeoffload.runtime import forked_randomness, mix_seed
from lightning_pipeoffload.runtime.step import (
    Microbatch,
    set_indices_and_weights,
    sharing_casts,
    split_into_slices,
)


class Fit:
    """The object to which the strategy delegates while a trainer runs; complete once it is made.

    Args:
        trainer: The trainer.
        split: The module, attached to its pipeline.
        processes: This rank's connections to the others.
        environment: What started the processes.
        making: Has made the module in parts.
        seed: The seed of the steps.
        resumed: What the fit continues; None: it resumes no other.
        at_end: Closed when the trainer leaves the entry, after an error too.
        after_hooks: Closed after the entry's last hook.

    Attributes:
        boundary: The weights between two steps.
        batch_end: What ranks exchange at a batch's end.
    """

    def __init__(
        self,
        trainer: Trainer,
        split: Split,
        processes: Processes,
        environment: ClusterEnvironment | None,
        making: PartedModuleBuilder,
        seed: int,
        resumed: ResumeState | None,
        at_end: ExitStack,
        after_hooks: ExitStack,
    ) -> None:
        pipeline, group, module = split.pipeline, split.group, trainer.lightning_module
        self._trainer: Any = trainer
        self._split, self._making = split, making
        self._precision = trainer.precision_plugin
        by_user = split.cutter.by_user
        self._first_batches = FirstBatches(group.replicas, checks_lists=not by_user)
        self._reading = BatchDistributor(
            trainer,
            group.batches,
            self._first_batches,
            None if resumed is None else resumed.reader_state(group.replica, group.num_replicas),
            resumed is not None,
        )
        self._reading.install(at_end)
        if processes.board is not None:
            processes.board.add_poll(self._reading.poll)
        # Code of the user's may make a batch another one on some ranks.
        compares_batches = by_user or bool(users_hooks(trainer, BEFORE_STEPS))
        self._exchange = Exchange(pipeline, pipeline.device.type != "cpu", compares_batches)
        self.boundary = StepBoundary(trainer, pipeline, split.masters)
        split.plans.set_boundary(self.boundary)
        at_end.callback(self.boundary.leave)
        self.batch_end = BatchEndExchange(
            trainer, split, self._exchange, self.boundary, processes, environment, at_end
        )
        at_end.enter_context(filtering_by_identity())
        totals = GradientClipper(self._precision, pipeline, self.boundary.validation)
        at_end.enter_context(clipping_across_stages(self._precision, totals))
        self._connector = install_shared_metrics(trainer, group, processes, at_end)
        self._hook_forwards = None
        if processes.barrier is not None:
            self._hook_forwards = HookForwards(pipeline, split.whole_runs, processes.barrier)
            at_end.callback(self._hook_forwards.remove_hooks)
        self._collected = None
        if group.num_ranks > 1:
            self._collected = CollectedValues(module, pipeline, self._connector)
        if group.num_replicas == 1:  # then there is nobody to gather from
            at_end.enter_context(silenced(".*sync_dist=True.*"))
        after_hooks.callback(ReplicaMetricSync(group.replicas, self._refuse_metric).end_run)
        self._evaluation = Evaluation(
            split, self._exchange, self._set_step_records, self._send_training_writes
        )
        # What each replica draws for itself: noise on its own data.
        seed = mix_seed(seed, group.replica) if group.replica else seed
        self._steps = StepCalls(module, seed, self.batch_end.stop, group.replicas.local_only)
        self._packed_rows = PackedRowCheck(module, self._steps, split, self._evaluation.run)
        self._backward = BatchBackward(module, self._precision, pipeline, self._collected)
        loops = LoopPatches(trainer, group, self.boundary, self.batch_end, self._collected)
        loops.install(self._backward, at_end)
        at_end.callback(self.boundary.stop_watching_weights)  # first: what follows may read weights

    def _refuse_metric(self, metric: Metric) -> None:
        if self._collected is not None:
            self._collected.refuse_metric(metric)

    def gather_reader_states(self) -> list[dict[str, Any]]:
        """Return what the reader of each replica has read, and its generators; all ranks call it.

        Empty before a pass.
        """
        states = self._split.group.world.gather(self._reading.state())
        read = [states[rank] for rank in self._split.group.roots]
        return [] if None in read else read

    # Training

    def configure_step_sync(self) -> None:
        """Configure the synchronization between steps."""
        if self._split.group.num_ranks > 1:
            check_hooks_reading_weights(self._trainer)
        self._split.parameters.move_hooks_to_end()
        self.boundary.configure_step_sync(self._split.plans.settings.optimizer_sync != "barrier")

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any], steps_later: bool) -> Any:
        """Run a training batch, and its backwards.

        Args:
            args: The positional arguments of ``training_step``.
            kwargs: The others.
            steps_later: Whether the optimizer steps after a later batch.

        Returns:
            What the steps have returned, of all microbatches; on ranks but the root a loss of zero.
        """
        self.boundary.stop_watching_weights()
        split = self._split
        with self._precision.train_step_context(), self._step_context("training_step"):
            inputs = self._steps.inputs("training_step", args, kwargs)
            microbatches = split.cutter.cut_training_batch(inputs)
            split.report.add_batch_tokens(inputs.batch, microbatches)
            accumulation = self._accumulation(steps_later)
            if not split.pipeline.committed:
                self._prepare_first_batch(microbatches[0], accumulation)
            if split.cutter.packs_rows(inputs.kind):
                self._packed_rows.check_first_batch(inputs)
            self._set_step_records(microbatches)
            done = self._run(inputs, microbatches, accumulation)
            self._log(done, self._trainer.accumulate_grad_batches)
        if accumulation.is_last and split.reduction is not None:
            split.finish_reduction(split.reduction)
        return self._backward.run_post_backward_hooks(done.value, accumulation)

    def _prepare_first_batch(self, first: Microbatch, accumulation: Accumulation) -> None:
        split = self._split
        metric_bytes = self._steps.metric_bytes
        split.plans.estimate_memory(first, split.parameters.optimizers(), metric_bytes)
        split.parameters.drop_remote_parameters()
        split.state.read_stored_optimizer_states()
        split.parameters.reserve_host(
            split.executor.memory.settings.host, self.boundary.validation.is_on
        )
        self._making.update_copies()
        self._making.release_copies()
        split.prepare_first_batch(first, accumulation.num_batches)

    def _run(
        self, inputs: StepInputs, microbatches: list[Microbatch], accumulation: Accumulation
    ) -> StepOutput:
        """Run the plan of a batch that was cut."""
        split, training, backward = self._split, self._split.plans.training, self._backward
        announces_to = split.reduction or (self._early_step if training.steps_early else None)
        self.batch_end.start_batch(len(microbatches))
        muted, wait_for_weights = self.boundary.start_before_validation(microbatches)
        with muted, sharing_casts(split.pipeline.device), self.batch_end.counting_batch():
            if split.reduction is not None:
                self._first_batches.compare_if_due()
            if split.plans.update_plan(accumulation.is_first):
                split.report.print_measured_plan()
            is_new = any(map(attrgetter("is_new"), microbatches))
            num_slices = microbatches[0].num_slices
            has_fewer_slices = num_slices < training.schedule.num_sequence_slices
            # Of the plan that runs: edges may have to hold more messages than the last one's.
            training.prepare_for_batch(is_new, split.pipeline.cut.costs, has_fewer_slices)
            self._exchange.start_batch_checksum(inputs.batch, f"batch in {inputs.kind}")
            sizes, shares = split.sizes_and_shares(inputs, microbatches)
            of_replica = split.replica_loss_factor()
            weights = [share * of_replica / accumulation.num_batches for share in shares]
            results = split.executor.run_to_backward(
                training.lower_for_training(len(microbatches), num_slices, accumulation.is_last),
                split_into_slices(
                    set_indices_and_weights(microbatches, weights, backward.differentiate)
                ),
                wait_for_weights,
                announces_to if accumulation.is_last else None,
            )
            backward.run_pre_backward_hooks(results)
            results = split.executor.run_rest()
        return StepOutput.of(results, sizes, shares)

    @cached_property
    def _early_step(self) -> EarlyStep:
        return self._split.parameters.make_early_step()

    def _accumulation(self, steps_later: bool) -> Accumulation:
        num_batches = self._trainer.accumulate_grad_batches
        return Accumulation(
            num_batches,
            is_first=not self._backward.adds_up,
            is_last=not steps_later,
            gradient_hooks=hooks_between_batches(self._trainer) if num_batches > 1 else (),
        )

    @contextmanager
    def _step_context(self, kind: str) -> Iterator[None]:
        """Run steps, which leave random numbers as they were, and call modules of their own."""
        forwards = nullcontext() if self._hook_forwards is None else self._hook_forwards.paused()
        collected = nullcontext() if self._collected is None else self._collected.in_step(kind)
        with forwards, forked_randomness(), collected:
            yield

    def _log(self, done: StepOutput, num_accumulated: int = 1) -> None:
        self._steps.log(done.sizes, done.shares)
        numbers = numbers_in(done.value)
        if "loss" in numbers:
            numbers["loss"] = numbers["loss"] / num_accumulated  # as Lightning gives it to hooks
        self._connector.publish(outputs=numbers)

    def end_training(self) -> None:
        """Compare the last batches, and print what was measured."""
        self.batch_end.compare_remaining()
        self._split.report.print_measurements()
        self.batch_end.requeue_if_asked()

    # Evaluation

    def evaluate(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a batch of an evaluation; return what its step has returned."""
        with self._step_context(kind), self.batch_end.counting_batch():
            inputs = self._steps.inputs(kind, args, kwargs)
            if self._split.cutter.packs_rows(inputs.kind):
                self._packed_rows.check_first_batch(inputs)
            done = self._evaluation.run(inputs)
            self._log(done)
        return done.value if self._collected is None else self._collected.outputs(kind, done.value)

    def _set_step_records(self, microbatches: Sequence[Microbatch]) -> None:
        if self._collected is not None:
            self._collected.set_step_records(microbatches)

    def _send_training_writes(self) -> None:
        if self._collected is not None:
            self._collected.send_training_writes()

"""One entry of the Trainer on one rank: a fit, a validation, a test or a prediction.

A training batch, in the order of the calls; ``batch_end.py`` goes on where this ends::

    strategy.optimizer_step  Fit.stepping       pending weights are watched no more (StepBoundary)
      the closure: Lightning runs training_step within the optimizer's step (BackwardInStep)
        Fit.train            StepCalls.inputs, Split.cut_training_batch
                             Fit._run           the plan, measured anew; the executor: F, B, W
                             LogCapture.replay  each name that steps have logged, once
                             BatchBackward.end  sums over ranks, on_after_backward
        GradientTotals       clipping, the loss scale
      the update             NarrowedOptimizer  of this rank's parameters only
                             StepBoundary       pending weights are watched from now on
    Lightning's logger connector, replaced by ``join_metrics``; when a batch has ended:
    BatchEnd.end_batch       one vector to all ranks, and that of the batch before: options alike,
                             stop, another plan
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torchmetrics import Metric

from lightning_pipeoffload.checkpoints import CheckpointHooks, Continued
from lightning_pipeoffload.loop.backward import BatchBackward, GradientTotals
from lightning_pipeoffload.loop.batch_end import BatchEnd
from lightning_pipeoffload.loop.data import (
    Arrivals,
    BatchChecks,
    FirstBatches,
    count_seen,
    silenced,
)
from lightning_pipeoffload.loop.evaluation import Evaluation
from lightning_pipeoffload.loop.exchange import Exchange
from lightning_pipeoffload.loop.hooks import (
    BEFORE_STEPS,
    CollectedValues,
    EndHooks,
    HookForwards,
    hooks_between_batches,
    numbers_in,
    refuse_other_callbacks,
    share_gradient_sizes,
    users_hooks,
)
from lightning_pipeoffload.loop.lightning_patches import (
    filtering_by_identity,
    join_loops,
    join_metrics,
    joined_precision,
)
from lightning_pipeoffload.loop.model_in_parts import ModelInParts
from lightning_pipeoffload.loop.packed_row_checks import PackedRowCheck
from lightning_pipeoffload.loop.reading import Reading
from lightning_pipeoffload.loop.requeue import Requeue, requeues
from lightning_pipeoffload.loop.split import Split
from lightning_pipeoffload.loop.step_boundary import StepBoundary
from lightning_pipeoffload.loop.step_calls import StepCalls, StepInputs, StepOutput
from lightning_pipeoffload.loop.stops import Clocks, JointStop
from lightning_pipeoffload.loop.weight_readers import check_weight_readers
from lightning_pipeoffload.metrics import MetricGroups, SharedMetricsConnector
from lightning_pipeoffload.optimizers import EarlyStep, MasterWeights
from lightning_pipeoffload.planning.training_plan import Accumulation
from lightning_pipeoffload.processes import (
    StepOptions,
    describe_module,
    describe_optimizers,
    describe_trainer,
    refuse_differences,
)
from lightning_pipeoffload.runtime import draw_seed, forked_randomness, mix_seed
from lightning_pipeoffload.runtime.step import Microbatch, in_slices, placed, sharing_casts


class Fit:
    """The object to which the strategy delegates while a trainer runs.

    Args:
        strategy: The strategy, whose processes are connected.

    Attributes:
        split: The module.
        trains: Whether it is a fit.
        is_running: Whether the entry has been set up, and not left.
        making: Makes the module in parts.
        backward: Runs a batch's backwards.
        boundary: The weights between two steps.
        batch_end: What ranks exchange at a batch's end.
    """

    split: Split
    backward: BatchBackward
    boundary: StepBoundary
    batch_end: BatchEnd
    _steps: StepCalls
    _evaluation: Evaluation
    _packed_rows: PackedRowCheck
    _connector: SharedMetricsConnector
    _collected: CollectedValues | None = None
    _hook_forwards: HookForwards | None = None
    _metric_groups: MetricGroups | None = None
    _reading: Reading
    _early_step: EarlyStep | None = None
    _num_steps = 0
    _has_sent = True  # what training steps have written

    def __init__(self, strategy: CheckpointHooks) -> None:
        assert strategy.lightning_module is not None
        self._strategy, self._group, self._settings = strategy, strategy.group, strategy.settings
        self._processes = strategy.processes
        self._module = strategy.lightning_module
        self._trainer: Any = self._module.trainer
        self._precision = strategy.precision_plugin
        self.trains = self._trainer.state.fn == TrainerFn.FITTING
        self.making = ModelInParts(strategy, self.trains)
        self._at_end = ExitStack()
        self._num_loaders: Counter[int] = Counter()
        self.is_running = self._is_restored = self._has_left = False

    # Setup, in the order in which it happens

    def attach(self, before: Split | None, masters: MasterWeights | None) -> Split:
        """Bring the module and the pipeline together.

        Args:
            before: The split of the same layers by an entry before; None: there was none.
            masters: The masters of parameters; None: there are none.
        """
        group = self._group
        self._seed = self._choose_seed()
        self._first_batches = FirstBatches(group.replicas)
        checks = BatchChecks(self._first_batches, self._settings.make_microbatches is None)
        resumed = self._strategy.continued.read
        replica = group.replica if len(resumed) == group.num_replicas else 0
        self._reading = Reading(
            self._trainer,
            group.batches,
            checks,
            resumed[replica] if resumed else None,
            self._resumes,
        )
        self._reading.join(self._at_end)
        if before is not None:
            self.split = before
            self.split.pipeline.attach()
        else:
            self.split = self._make_split(masters)
        self._at_end.callback(self.split.leave)
        if self._resumes:
            self.split.cutter.resume(self._strategy.continued.first_batch)
        pipeline = self.split.pipeline
        first_batch, num_entries = self.split.cutter.first_batch, self._strategy.num_entries
        self._strategy.continued = Continued(self._seed, first_batch, num_entries)
        is_late = self._strategy.root_device.type != "cpu"
        self._exchange = Exchange(pipeline, is_late, self._compares_batches())
        self.boundary = StepBoundary(self._trainer, pipeline, self.split.masters)
        self.split.plans.enter(self.boundary)
        self._at_end.callback(self.boundary.leave)
        self.is_running = True
        return self.split

    def _make_split(self, masters: MasterWeights | None) -> Split:
        strategy, parts = self._strategy, self.making.pop_parts()
        split = Split(
            self._module,
            self._group,
            self._settings,
            strategy.root_device,
            strategy.num_processes,
            parts,
            masters,
            lambda: strategy.optimizers,
        )
        self.making.follow_copies()
        return split

    def setup(self) -> None:
        """Bring the trainer and the pipeline together."""
        strategy, group, pipeline = self._strategy, self._group, self.split.pipeline
        self._at_end.enter_context(filtering_by_identity())
        if self.trains:
            strategy.setup_optimizers(self._trainer)
        if strategy.world_size > 1:
            refuse_differences(self._described(), group.world.host_group)
        strategy.setup_precision_plugin()
        validation = self.boundary.validation
        totals = GradientTotals(self._precision, pipeline, validation)
        self._at_end.enter_context(joined_precision(self._precision, totals))
        join_loops(self._trainer, group, self._at_end)
        self._join_metrics()
        if self._processes.meeting is not None:
            runs, meeting = self.split.whole_runs, self._processes.meeting
            self._hook_forwards = HookForwards(pipeline, runs, meeting)
            self._at_end.callback(self._hook_forwards.leave)
        if group.num_ranks > 1:
            self._collected = CollectedValues(self._module, pipeline, self._connector)
        if group.num_replicas == 1:  # then there is nobody to gather from
            self._at_end.enter_context(silenced(".*sync_dist=True.*"))
        self._metric_groups = MetricGroups(group.replicas, self._refuse_metric)
        stop = self._join_ranks()
        self._evaluation = Evaluation(
            self.split, self._exchange, self._note_microbatches, self._send_in_step
        )
        # What each replica draws for itself: noise on its own data.
        seed = mix_seed(self._seed, group.replica) if group.replica else self._seed
        self._steps = steps = StepCalls(self._module, seed, stop, group.replicas.tracing)
        self._packed_rows = PackedRowCheck(self._module, steps, self.split, self._evaluation.run)
        self.backward = BatchBackward(self._module, self._precision, pipeline, self._collected)

    def _choose_seed(self) -> int:
        """Return the seed of the steps: drawn, or that of the fit that is resumed."""
        strategy, loaded = self._strategy, self._strategy.continued
        strategy.agree_on_randomness()
        with forked_randomness():  # the user's generators give what they give on one device
            drawn = draw_seed()
        if self._resumes and loaded.seed is not None:
            strategy.num_entries = loaded.num_entries
            return loaded.seed
        strategy.num_entries += 1  # a second fit from the same state has other numbers
        return mix_seed(drawn, strategy.num_entries)

    def _compares_batches(self) -> bool:
        """Whether code of the user's may make a batch another one on some ranks."""
        return self._settings.make_microbatches is not None or bool(
            users_hooks(self._trainer, BEFORE_STEPS)
        )

    @property
    def _resumes(self) -> bool:
        return self.trains and self._trainer.ckpt_path is not None

    def narrow_optimizers(self) -> None:
        """Narrow new optimizers to this rank's parameters."""
        self._num_steps = 0
        self.split.parameters.narrow_steps()
        if self.split.state.is_split:  # by a fit before this one
            self.split.parameters.forget_remote()

    def _described(self) -> dict[str, str]:
        strategy = self._strategy
        described = describe_trainer(self._trainer) | strategy.describe_saving()
        if not self.split.pipeline.committed:  # training goes on with what each rank has written
            described |= describe_module(self._module)
        names = self.split.parameters.names
        return described | describe_optimizers(
            strategy.optimizers, names, strategy.lr_scheduler_configs
        )

    def _join_metrics(self) -> None:
        store, fail = self._processes.metrics_store, self._processes.fail
        self._connector = join_metrics(self._trainer, self._group, store, fail, self._at_end)
        self._at_end.callback(self._leave_connector)
        if store is not None:
            refuse_other_callbacks(self._trainer)
            end_hooks = EndHooks(self._trainer, self._connector.publish)
            self._at_end.callback(end_hooks.remove)
        if self._group.num_ranks > 1 or self.split.pipeline.gradients.owner_of is not None:
            self.boundary.share_before_hooks(self._share_gradient_sizes)

    def _leave_connector(self) -> None:
        if self._processes.board is not None:
            self._connector.leave()

    def _share_gradient_sizes(self) -> None:
        if self.split.state.is_split:
            share_gradient_sizes(self.split.pipeline)

    def _refuse_metric(self, metric: Metric) -> None:
        if self._collected is not None:
            self._collected.refuse_metric(metric)

    def _join_ranks(self) -> JointStop | None:
        """Send a rank's signals (stop, failure, requeue) to all ranks; return what stops them."""
        strategy, group = self._strategy, self._group
        board, environment = self._processes.board, strategy.cluster_environment
        stop = clocks = arrivals = requeue = None
        if board is not None and self.trains:
            assert self._processes.metrics_store is not None
            stop = JointStop(self._trainer, self._exchange, group.is_root)
            clocks = Clocks(self._trainer, self._exchange)
            self._at_end.callback(clocks.remove)
            if group.num_replicas > 1:
                arrivals = Arrivals(self._processes.metrics_store, group)
                board.add_poll(arrivals.poll)
        if board is not None:
            board.add_poll(self._reading.poll)
        if requeues(environment):
            requeue = Requeue(self._trainer, environment)
            if board is not None:
                board.add_poll(requeue.poll)
        arguments = self._trainer, self.split, self._exchange, self._options
        self.batch_end = BatchEnd(*arguments, stop, arrivals, clocks, requeue)
        return stop

    def _options(self) -> StepOptions | None:
        if not self.trains:
            return None
        return StepOptions(self._strategy.optimizers, self.split.pipeline.trained, self._num_steps)

    def note_loader(self, loader: object) -> None:
        """Check a loader, and note how its batches are cut."""
        self.split.cutter.note_loader(loader, self._trainer.training, self._trainer.predicting)
        if self._trainer.training:
            self.split.cutter.note_packed_rows(
                loader, self._count_loader(), count_seen(self._trainer)
            )

    def _count_loader(self) -> int:
        """Return how many training loaders of this epoch have been noted before."""
        epoch = self._trainer.current_epoch  # made anew in a later one they count from 0
        self._num_loaders[epoch] += 1
        return self._num_loaders[epoch] - 1

    def note_read(self) -> None:
        """Note for a checkpoint what the readers have read; all ranks call it together."""
        if self.trains:
            states = self._group.world.gather(self._reading.state())
            read = [states[rank] for rank in self._group.roots]
            if None not in read:
                self._strategy.continued = self._strategy.continued._replace(read=read)

    # Training

    def start_training(self) -> None:
        """Configure the synchronization between steps."""
        if self._group.num_ranks > 1:
            check_weight_readers(self._trainer)
        self.split.parameters.start_training()
        self.boundary.start_training(self._settings.optimizer_sync != "barrier")

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any], steps_later: bool) -> Any:
        """Run a training batch, and its backwards.

        Args:
            args: The positional arguments of ``training_step``.
            kwargs: The others.
            steps_later: Whether the optimizer steps after a later batch.
        """
        self.boundary.stop_watching()
        split, self._has_sent = self.split, False
        with self._precision.train_step_context(), self._between_hooks("training_step"):
            inputs = self._steps.inputs("training_step", args, kwargs)
            microbatches = split.cut_training_batch(inputs)
            accumulation = self._accumulation(steps_later)
            if not split.pipeline.committed:
                self._begin_training(microbatches[0], accumulation)
            if split.cutter.packs_rows(inputs.kind):
                self._packed_rows.check(inputs)
            self._note_microbatches(microbatches)
            done = self._run(inputs, microbatches, accumulation)
            self._log(done, self._trainer.accumulate_grad_batches)
        if accumulation.is_last and split.reduction is not None:
            split.finish_reduction(split.reduction)
        return self.backward.end(done.value, accumulation)

    def _begin_training(self, first: Microbatch, accumulation: Accumulation) -> None:
        split = self.split
        metric_bytes = self._steps.metric_bytes
        split.plans.estimate_memory(first, split.parameters.optimizers(), metric_bytes)
        split.parameters.leave_remote()
        split.state.read_optimizers()
        split.parameters.reserve_host(
            split.executor.memory.settings.host, self.boundary.validation.is_on
        )
        self.making.follow_copies()
        self.making.release_copies()
        split.begin_training(first, accumulation.num_batches)

    def _run(
        self, inputs: StepInputs, microbatches: list[Microbatch], accumulation: Accumulation
    ) -> StepOutput:
        """Run the plan of a batch that was cut."""
        split, training, backward = self.split, self.split.plans.training, self.backward
        if self._early_step is None and training.steps_early:
            self._early_step = split.parameters.early_step()
        self.batch_end.start_batch(len(microbatches))
        muted, wait_for_weights = self.boundary.start_ahead(microbatches)
        with muted, sharing_casts(self._strategy.root_device), self.batch_end.counted():
            if split.reduction is not None:
                self._first_batches.start_step()
            if split.plans.before_plan(accumulation.is_first):
                split.report.print_plan()
            # Of the plan that runs: edges may have to hold more messages than the last one's.
            is_new = any(map(attrgetter("is_new"), microbatches))
            num_slices = microbatches[0].num_slices
            has_fewer_slices = num_slices < training.schedule.num_sequence_slices
            training.expect(is_new, split.pipeline.cut.costs, has_fewer_slices)
            self._exchange.note(inputs.batch, f"batch in {inputs.kind}")
            sizes, shares = split.shares(inputs, microbatches)
            of_replica = split.share_of_replica()
            weights = [share * of_replica / accumulation.num_batches for share in shares]
            results = split.executor.run_to_backward(
                training.of_training(len(microbatches), num_slices, accumulation.is_last),
                in_slices(placed(microbatches, weights, backward.differentiate)),
                wait_for_weights,
                (split.reduction or self._early_step) if accumulation.is_last else None,
            )
            backward.start(results)
            results = split.executor.run_rest()
        return StepOutput.of(results, sizes, shares)

    def _accumulation(self, steps_later: bool) -> Accumulation:
        num_batches = self._trainer.accumulate_grad_batches
        return Accumulation(
            num_batches,
            is_first=not self.backward.adds_up,
            is_last=not steps_later,
            gradient_hooks=hooks_between_batches(self._trainer) if num_batches > 1 else (),
        )

    @contextmanager
    def _between_hooks(self, kind: str) -> Iterator[None]:
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

    def stepping(self) -> AbstractContextManager[None]:
        """Return the context of an optimizer's step."""
        self._num_steps += 1
        return self.boundary.stepping()

    def end_training(self) -> None:
        """Compare the last batches, and print what was measured."""
        self.batch_end.finish()
        self.note_read()
        self.split.report.print_end()
        if self.batch_end.requeue is not None:
            self.batch_end.requeue.end_training(self._group)

    # Evaluation

    def evaluate(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a batch of an evaluation; return what its step has returned."""
        with self._between_hooks(kind), self.batch_end.counted():
            inputs = self._steps.inputs(kind, args, kwargs)
            if self.split.cutter.packs_rows(inputs.kind):
                self._packed_rows.check(inputs)
            done = self._evaluation.run(inputs)
            self._log(done)
        return done.value if self._collected is None else self._collected.outputs(kind, done.value)

    # Where Lightning's loops and connector call

    def send_collected(self) -> None:
        """Send the attributes that steps wrote to all ranks, before the hooks of an epoch's end."""
        if self._collected is not None:
            self._collected.send()

    def _note_microbatches(self, microbatches: Sequence[Microbatch]) -> None:
        if self._collected is not None:
            self._collected.note(microbatches)

    def _send_in_step(self) -> None:
        if self._collected is not None and not self._has_sent:
            self._has_sent = True
            self._collected.send_in_step()

    def reset_logged(self) -> None:
        """Reset metrics, when Lightning does on global rank 0."""
        if self._collected is not None:
            self._collected.reset_logged()

    # The end

    def leave(self) -> bool:
        """Leave the trainer and the module, after an error too.

        Returns:
            Whether the run's last hook is over too.
        """
        if self.is_running:
            self.boundary.stop_watching()  # after an error; its hooks may have read weights
        self._has_left, self.is_running = True, False
        self._at_end.close()
        return self._is_restored

    def restore(self) -> bool:
        """Leave the user's objects as they were, after the run's last hook.

        Returns:
            Whether the run has left the trainer too.
        """
        self._is_restored = True
        self.making.release_copies()
        if self._metric_groups is not None:
            self._metric_groups.end_run()
            self._metric_groups = None
        return self._has_left

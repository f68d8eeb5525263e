"""One fit or evaluation on one rank, from setup to its end.

A training batch, in the order of the calls::

    strategy.training_step   FitRun.train       the pending weights of the last step are watched
                                                no more
                             StepCalls.inputs, PipelineRun.cut_training_batch
                             PipelineRun.train  RunPlans.before_plan; the executor: F, B, W
                             LogCapture.replay  each name that steps have logged, once
                             BatchBackward.end  sums over ranks, on_after_backward
    strategy.optimizer_step  FitRun.stepping    GradientTotals: clipping, the loss scale
                                                StepBoundary: pending weights are watched
    the connector            FitRun.end_batch   one vector to all ranks, and that of the batch
                                                before: batches alike, stop, another plan
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torchmetrics import Metric

from lightning_pipeoffload.checkpoints.checkpoint_hooks import CheckpointHooks
from lightning_pipeoffload.checkpoints.split_state import SplitState
from lightning_pipeoffload.loop.backward import BatchBackward, GradientTotals
from lightning_pipeoffload.loop.data import (
    Arrivals,
    FirstBatches,
    PipelineLoaders,
    count_seen,
    epoch_to_read,
    leave_out_seen,
)
from lightning_pipeoffload.loop.hooks.collected_values import CollectedValues
from lightning_pipeoffload.loop.hooks.hook_forwards import HookForwards
from lightning_pipeoffload.loop.hooks.sent_values import numbers_in
from lightning_pipeoffload.loop.hooks.users_hooks import (
    EndHooks,
    GradientHooks,
    hooks_between_batches,
    refuse_other_callbacks,
    share_gradient_sizes,
)
from lightning_pipeoffload.loop.lightning_patches import (
    filtering_by_identity,
    join_loops,
    join_metrics,
    joined_precision,
)
from lightning_pipeoffload.loop.model_in_parts import ModelInParts
from lightning_pipeoffload.loop.pipeline_run import PipelineRun
from lightning_pipeoffload.loop.requeue import Requeue, requeues
from lightning_pipeoffload.loop.step_boundary import StepBoundary
from lightning_pipeoffload.loop.step_calls import StepCalls, StepOutput
from lightning_pipeoffload.loop.step_exchange import Clocks, JointStop, Said, StepExchange
from lightning_pipeoffload.loop.weight_readers import check_weight_readers
from lightning_pipeoffload.metrics.metric_values import MetricGroups
from lightning_pipeoffload.metrics.shared_metrics import SharedMetricsConnector
from lightning_pipeoffload.optimizers.host_step import EarlyStep
from lightning_pipeoffload.optimizers.optimized_parameters import OptimizedParameters
from lightning_pipeoffload.planning.training_plan import Accumulation
from lightning_pipeoffload.processes.rank_differences import (
    StepOptions,
    describe_module,
    describe_optimizers,
    describe_trainer,
    refuse_differences,
)
from lightning_pipeoffload.runtime.randomness import draw_seed, forked_randomness, mix_seed
from lightning_pipeoffload.runtime.step.autocast import sharing_casts
from lightning_pipeoffload.runtime.step.microbatch import Microbatch


class FitRun:
    """The object to which the strategy delegates while a trainer runs.

    Args:
        strategy: The strategy, whose processes are connected.

    Attributes:
        run: The batches of the module on this rank.
        is_running: Whether the run has been set up, and not left.
        making: Makes the module in parts.
        backward: Runs a batch's backwards.
        boundary: The weights between two steps.
        exchange: What ranks compare after each batch.
        clocks: Decides what goes by the clock; None on one rank.
        requeue: Saves and requeues the fit under Slurm; None elsewhere.
    """

    run: PipelineRun
    backward: BatchBackward
    boundary: StepBoundary
    exchange: StepExchange
    clocks: Clocks | None = None
    requeue: Requeue | None = None
    _steps: StepCalls
    _connector: SharedMetricsConnector
    _collected: CollectedValues | None = None
    _hook_forwards: HookForwards | None = None
    _metric_groups: MetricGroups | None = None
    _stop: JointStop | None = None
    _arrivals: Arrivals | None = None
    _loaders: PipelineLoaders
    _early_step: EarlyStep | None = None
    _num_steps = 0

    def __init__(self, strategy: CheckpointHooks) -> None:
        self._strategy, self._group, self._settings = strategy, strategy.group, strategy.settings
        self._module = strategy._module
        self._trainer: Any = self._module.trainer
        self._precision = strategy.precision_plugin
        self._trains = self._trainer.state.fn == TrainerFn.FITTING
        self.making = ModelInParts(strategy, self._trains)
        self._at_end = ExitStack()
        self.is_running = self._is_given_back = self._has_left = False

    # Setup, in the order in which it happens

    def attach(self, before: PipelineRun | None) -> PipelineRun:
        """Bring the module and the pipeline together.

        Args:
            before: The run of the same module before this one; None: there was none.
        """
        strategy, group = self._strategy, self._group
        self.seed = strategy._seed = self._choose_seed()
        self._first_batches = FirstBatches(group.replicas)
        self._loaders = PipelineLoaders(
            self.seed,
            lambda: epoch_to_read(self._trainer),
            group.replica,
            self._first_batches,
            self._settings.make_microbatches is None,
        )
        self._at_end.callback(self._loaders.release)
        if before is not None and not self.making.is_made:
            self.run = before
            self.run.pipeline.attach()
        else:
            self._make_run()
        self._at_end.callback(self.run.leave)
        if self._resumes:
            self.run.cutter.resume(strategy.first_batch)
        strategy.first_batch = self.run.cutter.first_batch
        pipeline = self.run.pipeline
        self.exchange = StepExchange(pipeline, group, strategy.root_device.type != "cpu")
        self.boundary = StepBoundary(self._trainer, pipeline, group, strategy._masters)
        self.run.join(self.exchange, self.boundary)
        self._at_end.callback(self.boundary.validation.forget)
        self.is_running = True
        return self.run

    def _make_run(self) -> None:
        strategy, group, settings = self._strategy, self._group, self._settings
        device, num_local_ranks = strategy.root_device, strategy.num_processes
        parts = self.making.take_parts()
        self.run = PipelineRun(self._module, group, settings, device, num_local_ranks, parts)
        self.making.let_copies_follow()
        strategy._parameters = OptimizedParameters(
            self.run.pipeline,
            group,
            lambda: strategy.optimizers,
            settings.num_sharing(group.num_replicas),
            settings.per_parameter_optimizer,
            settings.optimizer_offload,
            strategy._masters,
        )
        self.run.measurements.step_seconds = strategy._parameters.host_step_seconds
        strategy._state = SplitState(
            self.run.pipeline, group, strategy._parameters, strategy._masters
        )

    def setup(self) -> None:
        """Bring the trainer and the pipeline together."""
        strategy, group, pipeline = self._strategy, self._group, self.run.pipeline
        self._at_end.enter_context(filtering_by_identity())
        if self._trains:
            strategy.setup_optimizers(self._trainer)
        if strategy.world_size > 1:
            refuse_differences(self._described(), group.world.host_group)
        strategy.setup_precision_plugin()
        validation = self.boundary.validation
        totals = GradientTotals(self._precision, group, pipeline.gradient_age, validation)
        self._at_end.enter_context(joined_precision(self._precision, totals))
        join_loops(self._trainer, group, self._at_end)
        self._join_metrics()
        if strategy._meeting is not None:
            self._hook_forwards = HookForwards(pipeline, group, strategy._meeting)
            self._at_end.callback(self._hook_forwards.leave)
        if group.num_ranks > 1:
            self._collected = CollectedValues(self._module, pipeline, group, self._connector)
        self._metric_groups = MetricGroups(group.replicas, self._refuse_metric)
        self._join_ranks()
        # What each replica draws for itself: noise on its own data.
        seed = mix_seed(self.seed, group.replica) if group.replica else self.seed
        self._steps = steps = StepCalls(self._module, seed, self._stop)
        group.replicas.in_trace = lambda: steps.is_tracing
        self.backward = BatchBackward(
            self._module, self._precision, pipeline, group, self._collected
        )

    def _choose_seed(self) -> int:
        """Return the seed of data and dropout: drawn, or that of the fit that is resumed."""
        self._strategy.agree_on_randomness()
        with forked_randomness():  # the generators go on when the run starts: a tuner's runs do not
            drawn = draw_seed()
        loaded = self._strategy._loaded_seed
        return loaded if self._resumes and loaded is not None else drawn

    @property
    def _resumes(self) -> bool:
        return self._trains and self._trainer.ckpt_path is not None

    def have_optimizers(self) -> None:
        """Narrow new optimizers to this rank's parameters."""
        self._num_steps = 0
        parameters = self._strategy._parameters
        parameters.narrow_steps()
        if self._strategy._is_split:  # by a fit before this one
            parameters.forget_remote()

    def _described(self) -> dict[str, str]:
        strategy = self._strategy
        described = describe_trainer(self._trainer)
        described["the strategy's save_distributed_checkpoint"] = str(
            strategy._save_distributed_checkpoint
        )
        if not self.run.pipeline.committed:  # training goes on with what each rank has written
            described |= describe_module(self._module)
        names = strategy._parameters.names
        return described | describe_optimizers(
            strategy.optimizers, names, strategy.lr_scheduler_configs
        )

    def _join_metrics(self) -> None:
        store, fail = self._strategy._metrics_store, self._strategy._fail_elsewhere
        self._connector = join_metrics(self._trainer, self._group, store, fail)
        self._connector.run = self
        self._at_end.callback(self._leave_connector)
        if store is not None:
            refuse_other_callbacks(self._trainer)
            end_hooks = EndHooks(self._trainer, self._connector.tick)
            self._at_end.callback(end_hooks.remove)
        if self._group.num_ranks > 1:
            hooks = GradientHooks(self._trainer, self._share_gradient_sizes)
            self.boundary.gradient_hooks = hooks
            self._at_end.callback(hooks.remove)

    def _leave_connector(self) -> None:
        self._connector.run = None
        if self._strategy._board is not None:
            self._connector.leave()

    def _share_gradient_sizes(self) -> None:
        if self._strategy._is_split:
            share_gradient_sizes(self.run.pipeline, self._group)

    def _refuse_metric(self, metric: Metric) -> None:
        if self._collected is not None:
            self._collected.refuse_metric(metric)

    def _join_ranks(self) -> None:
        """Send a rank's signals (stop, failure, requeue) to all ranks."""
        strategy, group = self._strategy, self._group
        board, environment = strategy._board, strategy.cluster_environment
        if board is not None and self._trains:
            assert strategy._metrics_store is not None
            self._stop = JointStop(self._trainer, group, self.exchange)
            self.clocks = Clocks(self._trainer, self.exchange)
            self._at_end.callback(self.clocks.remove)
            self._arrivals = Arrivals(strategy._metrics_store, group)
            board.also_look = (self._arrivals.look,)
        if requeues(environment):
            self.requeue = Requeue(self._trainer, environment)
            if board is not None:
                board.also_look = (*board.also_look, self.requeue.look)

    def own_loader(self, loader: object) -> None:
        """Make a loader's batches the same on every rank, and resume them where the fit does."""
        self._loaders.own(loader, self._trainer.training)
        self.run.cutter.note_loader(loader, self._trainer.training)
        if self._trainer.training:
            leave_out_seen(loader, count_seen(self._trainer))

    # Training

    def start_training(self) -> None:
        """Configure the synchronization between steps."""
        if self._group.num_ranks > 1:
            check_weight_readers(self._trainer)
        self._strategy._parameters.start_training()
        self.boundary.start_training(self._settings.optimizer_sync != "barrier")

    def train(self, args: tuple[Any, ...], kwargs: dict[str, Any], steps_later: bool) -> Any:
        """Run a training batch, and its backwards.

        Args:
            args: The positional arguments of ``training_step``.
            kwargs: The others.
            steps_later: Whether the optimizer steps after a later batch.
        """
        self.boundary.stop_watching()
        run = self.run
        with self._precision.train_step_context(), self._between_hooks("training_step"):
            inputs = self._steps.inputs("training_step", args, kwargs)
            slices = run.cut_training_batch(inputs)
            accumulation = self._accumulation(steps_later)
            if not run.pipeline.committed:
                self._begin_training(slices[0], accumulation)
            if self._early_step is None and run.plans.training.steps_early:
                self._early_step = self._strategy._parameters.early_step()
            if self._stop is not None:
                self._stop.start_batch(len(slices))
            muted, settle = self.boundary.start_ahead()
            with muted, sharing_casts(self._strategy.root_device), self._counted():
                self._first_batches.start_step()
                done = run.train(
                    inputs, slices, accumulation, self.backward, settle, self._early_step
                )
            self._log(done, self._trainer.accumulate_grad_batches)
        if accumulation.is_last:
            run.finish_reduction()
        return self.backward.end(done.value, accumulation)

    def _begin_training(self, first: Microbatch, accumulation: Accumulation) -> None:
        self.run.report.estimate_memory(first, self._strategy.optimizers)
        parameters = self._strategy._parameters
        parameters.leave_remote()
        host = self.run.executor.memory.settings.host
        parameters.reserve_host(host, self.boundary.validation.is_on)
        self.making.let_copies_follow()
        self.making.leave_copies()
        self.run.begin_training(accumulation)

    def _accumulation(self, steps_later: bool) -> Accumulation:
        num_batches = self._trainer.accumulate_grad_batches
        return Accumulation(
            num_batches,
            is_first=not self.backward.adds_up,
            is_last=not steps_later,
            watched_by=hooks_between_batches(self._trainer) if num_batches > 1 else (),
        )

    def _counted(self) -> AbstractContextManager[None]:
        return nullcontext() if self._arrivals is None else self._arrivals.batch()

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
        self._connector.tick(outputs=numbers)

    def stepping(self) -> AbstractContextManager[None]:
        """Return the context of an optimizer's step."""
        self._num_steps += 1
        return self.boundary.stepping()

    def end_training(self) -> None:
        """Compare the last batches, and print what was measured."""
        self.finish_checking()
        self.run.report.print_end()
        if self.requeue is not None:
            self.requeue.end_training(self._group)

    # Evaluation

    def evaluate(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a batch of an evaluation; return what its step has returned."""
        with self._between_hooks(kind), self._counted():
            inputs = self._steps.inputs(kind, args, kwargs)
            done = self.run.evaluate(inputs, self._send_in_step)
            self._log(done)
        return done.value if self._collected is None else self._collected.outputs(kind, done.value)

    # Where Lightning's loops and connector call

    def end_batch(self) -> None:
        """Exchange with all ranks, after the hooks of a batch's end."""
        if self._trainer.training:
            plans, wants_stop = self.run.plans, self._wants_stop()
            due = 0 if self.clocks is None else self.clocks.end_batch()
            self.exchange.turn(plans.said(wants_stop, due), self._options())
            said = self.exchange.take()
            if self._stop is not None:
                self._stop.end_batch(wants_stop, said.stops)
            plans.hear(said)
        if self.requeue is not None:
            self.requeue.end_batch()

    def _wants_stop(self) -> bool:
        return self._stop is not None and self._stop.wants()

    def _options(self) -> StepOptions | None:
        if not self._trains:
            return None
        return StepOptions(self._strategy.optimizers, self.run.pipeline.trained, self._num_steps)

    def arrive(self) -> None:
        """Check that all ranks reach a milestone after the same number of batches."""
        if self._arrivals is not None:
            self._arrivals.arrive()

    def settle(self) -> None:
        """Stop all ranks if one of them has set ``trainer.should_stop``; they wait here."""
        self.arrive()
        if self._stop is not None:
            self._stop.settle(self._settle_exchange())

    def compare(self) -> None:
        """Compare the last batches and the optimizers' options; all ranks call it, and wait."""
        any_stops = self._settle_exchange()
        if self._stop is not None:
            self._stop.remember(any_stops)

    def finish_checking(self) -> None:
        """Compare what is not compared yet, after the last batch."""
        self._settle_exchange()
        self.run.check_weights()

    def _settle_exchange(self) -> bool:
        """Compare now, and wait; returns whether any rank wants to stop."""
        said = self.exchange.settle(Said(stops=self._wants_stop()), self._options())
        self.run.plans.hear(said)
        return said.stops

    def send_collected(self) -> None:
        """Send the attributes that steps wrote to all ranks, before the hooks of an epoch's end."""
        if self._collected is not None:
            self._collected.send()

    def _send_in_step(self) -> None:
        if self._collected is not None:
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
        return self._is_given_back

    def give_back(self) -> bool:
        """Leave the user's objects as they were, after the run's last hook.

        Returns:
            Whether the run has left the trainer too.
        """
        self._is_given_back = True
        self.making.leave_copies()
        if self._metric_groups is not None:
            self._metric_groups.end_run()
            self._metric_groups = None
        return self._has_left

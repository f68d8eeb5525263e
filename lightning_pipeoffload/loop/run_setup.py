"""Sets a run up: what stands between Lightning's trainer and the pipeline, and leaves it again."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torchmetrics import Metric
from typing_extensions import override

from lightning_pipeoffload.checkpoints.split_state import SplitState
from lightning_pipeoffload.checkpoints.whole_again import make_whole
from lightning_pipeoffload.loop.arrivals import Arrivals
from lightning_pipeoffload.loop.batch_backward import BatchBackward
from lightning_pipeoffload.loop.callback_checks import (
    check_callbacks,
    check_profiler,
    refuse_synchronized_norms,
)
from lightning_pipeoffload.loop.clocks import Clocks
from lightning_pipeoffload.loop.data import PipelineLoaders, count_seen, leave_out_seen
from lightning_pipeoffload.loop.first_batches import FirstBatches
from lightning_pipeoffload.loop.hooks.collected_values import CollectedValues
from lightning_pipeoffload.loop.hooks.end_hooks import EndHooks
from lightning_pipeoffload.loop.hooks.gradient_hooks import GradientHooks
from lightning_pipeoffload.loop.hooks.gradient_sizes import share_gradient_sizes
from lightning_pipeoffload.loop.hooks.hook_forwards import HookForwards
from lightning_pipeoffload.loop.joint_stop import JointStop
from lightning_pipeoffload.loop.lightning_loops import join_loops, refuse_module
from lightning_pipeoffload.loop.model_in_parts import ModelInParts
from lightning_pipeoffload.loop.pipeline_run import PipelineRun
from lightning_pipeoffload.loop.requeue import Requeue, join_requeue
from lightning_pipeoffload.loop.shared_gradients import leave_gradients, share_gradients
from lightning_pipeoffload.loop.step_barrier import has_step_barrier
from lightning_pipeoffload.loop.step_border import StepBorder
from lightning_pipeoffload.loop.step_calls import StepCalls
from lightning_pipeoffload.metrics.metric_groups import MetricGroups
from lightning_pipeoffload.metrics.shared_metrics import SharedMetricsConnector
from lightning_pipeoffload.optimizers.optimized_parameters import OptimizedParameters
from lightning_pipeoffload.optimizers.step_options import StepOptions
from lightning_pipeoffload.processes.rank_differences import (
    describe_module,
    describe_optimizers,
    describe_trainer,
    refuse_differences,
)
from lightning_pipeoffload.runtime.cut.absent_values import ModuleCopies
from lightning_pipeoffload.runtime.randomness import draw_seed, forked_randomness, mix_seed
from lightning_pipeoffload.runtime.shapes.equal_is_same import EqualIsSame

_OF_A_RUN = frozenset({
    *("_group", "_board", "_metrics_store", "_meeting", "_launched"),
    *("_run", "_parameters", "_state", "_loaders", "_steps", "_copies", "backward_of_batch"),
    *("_blueprint", "_hook_forwards", "_end_hooks", "_gradient_hooks", "_metric_groups"),
    "_collected",
    *("_requeue", "_stop", "_arrivals", "_first_batches", "_clocks", "_weights_watch", "_border"),
})  # fmt: skip


class RunSetup(ModelInParts):
    """Brings a trainer and a module together with the pipeline that runs them."""

    _steps: StepCalls
    _first_batches: FirstBatches
    backward_of_batch: BatchBackward
    _metric_groups: MetricGroups | None = None
    _end_hooks: EndHooks | None = None
    _collected: CollectedValues | None = None
    _gradient_hooks: GradientHooks | None = None
    _clocks: Clocks | None = None
    _requeue: Requeue | None = None
    _loaders: PipelineLoaders | None = None
    _hook_forwards: HookForwards | None = None
    _stop: JointStop | None = None
    _border: StepBorder | None = None
    _arrivals: Arrivals | None = None
    _num_steps = 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is of a run, and of this process: a trainer may be saved after a fit."""
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in _OF_A_RUN}

    @property
    def run(self) -> PipelineRun:
        """What runs the module on this rank.

        Raises:
            RuntimeError: The trainer has not set the strategy up yet.
        """
        if self._run is None:
            raise RuntimeError("there is no pipeline before the trainer has set the strategy up")
        return self._run

    @property
    @override
    def place(self) -> str:
        return self._run.place if self._run is not None else ""

    @property
    @override
    def is_in_step(self) -> bool:
        return self._run is not None and self._run.pipeline.is_in_step

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._note_copies()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        refuse_module(self._module, trainer)
        check_callbacks(trainer)
        check_profiler(trainer)
        refuse_synchronized_norms(trainer, self.num_replicas)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self._module)
        self.model_to_device()
        self._seed = self._choose_seed(trainer)
        self._first_batches = FirstBatches(self.group.replicas)
        self._loaders = PipelineLoaders(
            self._seed, lambda: trainer.current_epoch, self.group.replica, self._first_batches
        )
        self._attach()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        if self.world_size > 1:
            refuse_differences(self._described(trainer), self.group.world.host_group)
        self.setup_precision_plugin()
        age = self.run.pipeline.gradient_age
        self._border = share_gradients(self.precision_plugin, self.group, age)
        self._end_hooks = join_loops(trainer, self.group, self._metrics_store, self._fail_elsewhere)
        if self.group.num_ranks > 1:
            self._gradient_hooks = GradientHooks(trainer, self._share_gradient_sizes)
        self.run.plans.has_step_barrier = lambda: self._has_barrier(trainer)
        if self._meeting is not None:
            self._hook_forwards = HookForwards(self.run.pipeline, self.group, self._meeting)
        self._collect()
        self._join_ranks(trainer)
        self._requeue = join_requeue(
            trainer, self.cluster_environment, self._connector, self._board
        )

    def _step_options(self) -> StepOptions:
        return StepOptions(self.optimizers, self.run.pipeline.trained, self._num_steps)

    def _collect(self) -> None:
        """Let hooks of an epoch's end have what steps leave behind, on every rank."""
        self._collected = None
        if self.group.num_ranks > 1:
            given = self._module, self.run.pipeline, self.group, self._connector
            self._collected = collected = CollectedValues(*given)
            self._steps.watching = collected.watching
            self._connector.at_epoch_end = collected.send
            self._connector.at_reset = collected.reset_logged
        self._metric_groups = MetricGroups(self.group.replicas, self._refuse_metric)

    def _refuse_metric(self, metric: Metric) -> None:
        if self._collected is not None:
            self._collected.refuse_metric(metric)

    def _has_barrier(self, trainer: Trainer) -> bool:
        goes_ahead = self._border is not None and self._border.keeps_copies
        return has_step_barrier(trainer, self._gradient_hooks) and not goes_ahead

    def _described(self, trainer: Trainer) -> dict[str, str]:
        described = describe_trainer(trainer)
        described["the strategy's save_distributed_checkpoint"] = str(self._saves_folder)
        if not self.run.pipeline.committed:  # training goes on with what each rank has written
            described |= describe_module(self._module)
        return described | describe_optimizers(
            self.optimizers, self._parameters.names, self.lr_scheduler_configs
        )

    def _choose_seed(self, trainer: Trainer) -> int:
        """Return the seed of data and dropout: drawn, or that of the fit that is resumed."""
        self.agree_on_randomness()
        with forked_randomness():  # the generators go on when the run starts: a tuner's runs do not
            drawn = draw_seed()
        resumes = trainer.state.fn == TrainerFn.FITTING and trainer.ckpt_path is not None
        return self._loaded_seed if resumes and self._loaded_seed is not None else drawn

    @property
    def _replica_seed(self) -> int:
        """The seed of what each replica draws for itself: noise on its own data."""
        return mix_seed(self._seed, self.group.replica) if self.group.replica else self._seed

    def _join_ranks(self, trainer: Trainer) -> None:
        """Let what one rank meets in a fit count for all: an order to stop, the end of its data."""
        self._stop = self._arrivals = None
        if self._board is None or trainer.state.fn != TrainerFn.FITTING:
            return
        assert self._metrics_store is not None
        self._stop = JointStop(trainer, self.group)
        self._steps.end_step = self._stop.end_step
        self._connector.at_batch_end = (self._stop.end_batch, self.run.plans.end_batch)
        self._clocks = Clocks(trainer, self.group.world)
        self._arrivals = Arrivals(self._metrics_store, self.group)
        self._connector.at_data_end = self._arrivals.arrive
        self._board.also_look = (self._arrivals.look,)

    def _attach(self) -> None:
        if self._run is not None and self._run.pipeline.module is self._module:
            self._run.pipeline.attach()
        else:
            if self._blueprint is None:
                make_whole(self._module, self.group)
            self._run = PipelineRun(
                self._module,
                self.group,
                self.settings,
                self.root_device,
                self.num_processes,
                self._take_parts(),
            )
            if self._copies is not None:
                self._copies.follow()
            sharing = self.settings.num_sharing(self.group.num_replicas)
            self._parameters = OptimizedParameters(
                self._run.pipeline,
                self.group,
                lambda: self.optimizers,
                sharing,
                self.settings.per_parameter_optimizer,
            )
            self._state = SplitState(self._run.pipeline, self.group, self._parameters)
        self._steps = StepCalls(self._module, self._replica_seed)
        self.group.replicas.in_probe = lambda: self._steps.is_probing
        self.backward_of_batch = BatchBackward(
            self._module, self.precision_plugin, self._run, self.group
        )

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        with EqualIsSame():
            super().setup_optimizers(trainer)
        self._num_steps = 0
        self.run.comparison.options = self._step_options
        self._parameters.narrow_steps()
        if self._is_split:  # by a fit before this one
            self._parameters.forget_foreign()

    def _note_copies(self) -> None:
        """Follow the deep copies of the module that hooks make before it is split."""
        if self._trainer.state.fn == TrainerFn.FITTING and self.group.num_ranks > 1:
            self._copies = ModuleCopies(self._module)

    def _leave_copies(self) -> None:
        """Let copies of the module be split like it, from now on without help."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.follow()
            copies.remove()

    @override
    def model_to_device(self) -> None:
        """Move metrics; each stage's part follows when the first batch has shown what it needs."""
        for part in self._module.modules():
            if isinstance(part, Metric):  # whose states are neither parameters nor buffers
                part.to(self.root_device)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._loaders is None:  # a callback looks at it, before the run makes it anew
            return dataloader
        self._loaders.own(dataloader, self._trainer.training)
        if self._trainer.training:
            leave_out_seen(dataloader, count_seen(self._trainer))
        return dataloader

    def _share_gradient_sizes(self) -> None:
        if self._is_split:
            share_gradient_sizes(self.run.pipeline, self.group)

    @property
    def _connector(self) -> SharedMetricsConnector:
        return self._trainer._logger_connector  # type: ignore[return-value]

    @override
    def _break_off(self, is_of_all: bool) -> None:
        super()._break_off(is_of_all)
        connector = self._trainer._logger_connector
        if isinstance(connector, SharedMetricsConnector):
            connector.abandon()

    @override
    def teardown(self) -> None:
        if self._run is not None:
            if self._loaders is not None:
                self._loaders.release()
                self._loaders = None
            self._run.leave()
            connector = self._trainer._logger_connector
            if self._board is not None and isinstance(connector, SharedMetricsConnector):
                connector.leave()
        # The last that were wrapped first.
        for hooks in (self._clocks, self._gradient_hooks, self._end_hooks):
            if hooks is not None:
                hooks.remove()
        self._clocks = self._gradient_hooks = self._end_hooks = None
        if self._hook_forwards is not None:
            self._hook_forwards.leave()
            self._hook_forwards = None
        leave_gradients(self.precision_plugin, self._border)
        super().teardown()

    @override
    def give_back(self) -> None:
        super().give_back()
        if self._copies is not None:
            self._copies.remove()
            self._copies = None
        if self._metric_groups is not None:
            self._metric_groups.end_run()
            self._metric_groups = None

"""The Lightning strategy: Lightning's hooks around a step, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_pipeoffload.checkpoints.file import MovingCheckpointIO, let_move, present
from lightning_pipeoffload.checkpoints.folder import (
    META_FILE,
    is_checkpoint_folder,
    read_checkpoint_folder,
    refuse_file_io,
    refuse_remote_folder,
    write_checkpoint_folder,
)
from lightning_pipeoffload.checkpoints.scattered_values import bring_values
from lightning_pipeoffload.checkpoints.split_state import SplitState
from lightning_pipeoffload.checkpoints.state_collector import shapes_of
from lightning_pipeoffload.checkpoints.whole_again import make_whole
from lightning_pipeoffload.hooks.end_hooks import EndHooks
from lightning_pipeoffload.hooks.gradient_hooks import GradientHooks
from lightning_pipeoffload.hooks.gradient_sizes import share_gradient_sizes
from lightning_pipeoffload.hooks.hook_forwards import HookForwards
from lightning_pipeoffload.hooks.outputs_elsewhere import numbers_in
from lightning_pipeoffload.hooks.users_hooks import hooks_between_batches
from lightning_pipeoffload.loop.arrivals import Arrivals
from lightning_pipeoffload.loop.batch_backward import BatchBackward
from lightning_pipeoffload.loop.callback_checks import check_callbacks, check_profiler
from lightning_pipeoffload.loop.data import PipelineLoaders, leave_out_seen
from lightning_pipeoffload.loop.gradient_clipping import clip_by_own_norm, clip_over_ranks
from lightning_pipeoffload.loop.joint_stop import JointStop
from lightning_pipeoffload.loop.lightning_loops import join_loops, refuse_module
from lightning_pipeoffload.loop.loss_scale import leave_loss_scale, share_loss_scale
from lightning_pipeoffload.loop.pipeline_run import PipelineRun, StepOutput
from lightning_pipeoffload.loop.requeue import Requeue, join_requeue
from lightning_pipeoffload.loop.step_calls import UsersSteps
from lightning_pipeoffload.metrics.shared_metrics import LocalMetrics, SharedMetricsConnector
from lightning_pipeoffload.optimizers.optimized_parameters import OptimizedParameters
from lightning_pipeoffload.optimizers.optimizer_state import name_optimizer_state
from lightning_pipeoffload.optimizers.trial import refuse_optimizer
from lightning_pipeoffload.planning.accumulation import Accumulation
from lightning_pipeoffload.planning.argument_checks import check_backend, check_flag, check_timeout
from lightning_pipeoffload.planning.settings import PipelineSettings, ScheduleLike, refuse_unbuilt
from lightning_pipeoffload.processes.processes import PipelineProcesses
from lightning_pipeoffload.processes.rank_differences import (
    describe_module,
    describe_optimizers,
    describe_trainer,
    refuse_differences,
)
from lightning_pipeoffload.processes.tensor_gather import gather_tensor
from lightning_pipeoffload.runtime.cut.module_copies import ModuleCopies
from lightning_pipeoffload.runtime.randomness import draw_seed, forked_randomness
from lightning_pipeoffload.runtime.shapes.equal_is_same import EqualIsSame
from lightning_pipeoffload.runtime.step.autocast import sharing_casts
from lightning_pipeoffload.schedule import Schedule

_SEED = "pipeoffload_seed"
_OF_A_RUN = frozenset(
    (
        "_group",
        "_board",
        "_metrics_store",
        "_meeting",
        "_hook_forwards",
        "_run",
        "_parameters",
        "_state",
        "_loaders",
        "_steps",
    )
    + ("backward_of_batch", "_local_metrics", "_end_hooks", "_gradient_hooks", "_requeue")
    + ("_stop", "_arrivals", "_launched", "_copies")
)


class PipeOffloadStrategy(PipelineProcesses):
    """Trains an unchanged LightningModule over the stages of a pipeline.

    The module is cut at the entries of one ModuleList or Sequential. Each rank runs the module's
    own ``training_step``, of which only its stage's blocks compute. The last stage, with the loss
    and ``self.log``, is on global rank 0.

    Args:
        pipeline_parallel_size: ranks of one pipeline; "auto": all devices.
        data_parallel_size: replicas of the pipeline. Not built yet.
        num_microbatches: slices of one batch along dimension 0; "auto": the smallest divisor of the
            first batch that the schedule allows and that is at least twice the ranks, else the
            largest that it allows.
        num_chunks: stages of each rank; "auto": the schedule's own.
        schedule: a name, a :class:`~lightning_pipeoffload.schedule.Schedule`, a callable
            ``(num_ranks, num_microbatches) -> Schedule``, or the path of a .csv file. "auto":
            zb_h1.
        offload: which activations go to the host between F and B, or between B and W: "none",
            "half" or "full" of each rank's, or a share from 0 to 1, stages that live longest
            first; "auto": as few as ``memory_limit`` asks for. Planned anew after the first three
            steps, with what they measured.
        recompute: what the backward computes again instead of keeping it: "none"; "cheap": norms,
            activations and dropout; "full": the blocks, each once.
        memory_limit: bytes, or "40GiB", of each device for activations and what waits for W; what
            does not fit by any order and offload is refused with the least that does. None: what
            parameters, gradients and optimizer leave of the device; no limit on CPU. Under a limit
            the first three steps, which measure, run one microbatch at a time.
        host_memory_limit: bytes, or "64GiB", of host memory that each rank may take for what it
            offloads; None: its share of what the machine, or the container, has left when training
            is set up, but for a reserve. Where it does not suffice, training stops before the
            machine swaps.
        blocks: name of the ModuleList or Sequential to cut ("model.layers"), or patterns of the
            blocks' names in calling order (["layer1.*", "layer2.*"]); None: found.
        split: "auto": balanced by cost; "even"; or the number of blocks of each stage.
        microbatch_weight: weight of a microbatch's loss in the batch's: "samples", or a callable of
            the microbatch that returns, say, the number of tokens that count.
        optimizer_sync: when ranks agree on the gradient's norm. Not built yet.
        save_distributed_checkpoint: write a checkpoint as a folder, each rank what it owns, instead
            of as one file from global rank 0. Either is read whatever this is.
        process_group_backend: of ``torch.distributed``; None: gloo on CPU, nccl on CUDA.
        timeout: of the process groups: a rank that waits longer than this for another one fails.
        accelerator: given by the Trainer, as the rest.
        parallel_devices: the devices of this machine.
        cluster_environment: who started the processes.
        checkpoint_io: writes and reads checkpoints.
        precision_plugin: the arithmetic.

    Raises:
        ValueError: an argument that cannot be, or is not built yet.
    """

    strategy_name = "pipeoffload"
    _run: PipelineRun | None = None
    _local_metrics: LocalMetrics | None = None
    _end_hooks: EndHooks | None = None
    _gradient_hooks: GradientHooks | None = None
    _requeue: Requeue | None = None
    _loaders: PipelineLoaders | None = None
    _hook_forwards: HookForwards | None = None
    _stop: JointStop | None = None
    _arrivals: Arrivals | None = None
    _copies: ModuleCopies | None = None
    _loaded_seed: int | None = None

    def __init__(  # noqa: PLR0913 - the interface
        self,
        pipeline_parallel_size: int | str = "auto",
        data_parallel_size: int = 1,
        num_microbatches: int | str = "auto",
        num_chunks: int | str = "auto",
        schedule: ScheduleLike = "auto",
        offload: str | float = "auto",
        recompute: str = "none",
        memory_limit: int | str | None = None,
        host_memory_limit: int | str | None = None,
        blocks: str | Sequence[str] | None = None,
        split: str | Sequence[int] = "auto",
        microbatch_weight: str | Callable[[Any], float] = "samples",
        optimizer_sync: str = "auto",
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        )
        refuse_unbuilt(
            data_parallel_size=data_parallel_size,
            optimizer_sync=optimizer_sync,
        )
        check_flag("save_distributed_checkpoint", save_distributed_checkpoint)
        check_backend(process_group_backend)
        check_timeout(timeout)
        self.settings = PipelineSettings(
            pipeline_parallel_size,
            num_microbatches,
            num_chunks,
            schedule,
            blocks,
            split,
            microbatch_weight,
            offload,
            recompute,
            memory_limit,
            host_memory_limit,
        )
        self._steps_later = False
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._saves_folder = save_distributed_checkpoint

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is of a run, and of this process: a trainer may be saved after a fit."""
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name not in _OF_A_RUN}

    # What is asked of the strategy

    @property
    def run(self) -> PipelineRun:
        """What runs the module on this rank.

        Raises:
            RuntimeError: before the trainer has set the strategy up.
        """
        if self._run is None:
            raise RuntimeError("there is no pipeline before the trainer has set the strategy up")
        return self._run

    @property
    def plan(self) -> Schedule:
        """The lowered plan of a training batch, or of several that accumulate.

        Until there was one it is of a provisional size.
        """
        return self.run.plan

    def report(self, live_bytes: bool = False) -> dict[str, Any]:
        """Describe the pipeline: what is predicted, in units of an average block, and measured.

        Lists are in pipeline order. Of ``measured``, other ranks' entries are None until training
        has ended. All of it can be written as JSON.

        Args:
            live_bytes: with ``measured["live_bytes"]``, what each rank kept over the last step:
                seconds, and bytes on the device, on the host and between them, after each action.

        Raises:
            RuntimeError: before the first batch, which decides how the module is cut.
        """
        return self.run.report(live_bytes)

    @property
    @override
    def place(self) -> str:
        return self._run.place if self._run is not None else ""

    @property
    @override
    def is_in_step(self) -> bool:
        return self._run is not None and self._run.pipeline.is_in_step

    @property
    @override
    def left_hook(self) -> str:
        return self._end_hooks.left if self._end_hooks is not None else ""

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the value of a parameter, a buffer or a gradient, on whatever rank it is.

        All ranks call it, in the same order, in hooks.

        Args:
            tensor: of the module, or the gradient of one.

        Returns:
            A copy.

        Raises:
            ValueError: it is neither, or not the one that the other ranks ask for.
            RuntimeError: inside a step, or in a hook that the other ranks have left.
        """
        self._refuse_alone("trainer.strategy.gather")
        return gather_tensor(self.run.pipeline, self.group, tensor)

    # Setting up

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        return self._module.trainer

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._note_copies()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        refuse_module(self._module, trainer)
        check_callbacks(trainer)
        check_profiler(trainer)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self._seed = self._choose_seed(trainer)
        self._loaders = PipelineLoaders(self._seed, lambda: trainer.current_epoch)
        self._attach()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        if self.world_size > 1:
            refuse_differences(self._described(trainer), self.group.host_group)
        self.setup_precision_plugin()
        age = self.run.pipeline.gradient_age
        clip_over_ranks(self.precision_plugin, self.group, age)
        share_loss_scale(self.precision_plugin, self.group, age)
        self._end_hooks = join_loops(
            trainer, self.group.is_root, self._metrics_store, self._fail_elsewhere
        )
        if self._end_hooks is not None:
            self._steps.watching = self._end_hooks.watching_step
            self._gradient_hooks = GradientHooks(trainer, self._share_gradient_sizes)
        if self._meeting is not None:
            self._hook_forwards = HookForwards(
                self.run.pipeline, self.group, self._meeting, lambda: self.left_hook
            )
        self._local_metrics = LocalMetrics(self._module)
        self._join_ranks(trainer)
        self._requeue = join_requeue(
            trainer, self.cluster_environment, self._connector, self._board
        )

    def _described(self, trainer: Trainer) -> dict[str, str]:
        described = describe_trainer(trainer)
        described["the strategy's save_distributed_checkpoint"] = str(self._saves_folder)
        if not self._is_split:  # training goes on with what each rank has written
            described |= describe_module(self._module)
        return described | describe_optimizers(
            self.optimizers, self._parameters.names, self.lr_scheduler_configs
        )

    def _choose_seed(self, trainer: Trainer) -> int:
        """Return the seed of data and dropout: drawn, or that of the fit that is resumed."""
        self.agree_on_randomness()
        drawn = draw_seed()
        resumes = trainer.state.fn == TrainerFn.FITTING and trainer.ckpt_path is not None
        return self._loaded_seed if resumes and self._loaded_seed is not None else drawn

    def _join_ranks(self, trainer: Trainer) -> None:
        """Let what one rank meets in a fit count for all: an order to stop, the end of its data."""
        self._stop = self._arrivals = None
        if self._board is None or trainer.state.fn != TrainerFn.FITTING:
            return
        assert self._metrics_store is not None
        self._stop = JointStop(trainer, self.group)
        self._steps.end_step = self._stop.end_step
        self._connector.at_batch_end = (self._stop.end_batch,)
        self._arrivals = Arrivals(self._metrics_store, self.global_rank, self.world_size)
        self._connector.at_data_end = self._arrivals.arrive
        self._board.also_look = (self._arrivals.look,)

    def _attach(self) -> None:
        if self._run is not None and self._run.pipeline.module is self._module:
            self._run.pipeline.attach()
        else:
            make_whole(self._module, self.group)
            if self._copies is not None:
                self._copies.follow()
            self._run = PipelineRun(
                self._module, self.group, self.settings, self.root_device, self.num_processes
            )
            self._parameters = OptimizedParameters(
                self._run.pipeline, self.group, lambda: self.optimizers
            )
            self._state = SplitState(self._run.pipeline, self.group, self._parameters)
        self._steps = UsersSteps(self._module, self._run, self._seed)
        self.backward_of_batch = BatchBackward(
            self._module, self.precision_plugin, self._run, self.group
        )

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        with EqualIsSame():
            super().setup_optimizers(trainer)
        if self.group.num_ranks > 1:
            for optimizer in self.optimizers:
                refuse_optimizer(optimizer, self.root_device, self.group.num_ranks)
            self._parameters.narrow_steps()
        if self._is_split:  # by a fit before this one
            self._parameters.forget_foreign()

    def _note_copies(self) -> None:
        """Follow the deep copies of the module that hooks make before it is split."""
        is_fit = self._trainer.state.fn == TrainerFn.FITTING
        if is_fit and self.group.num_ranks > 1:
            self._copies = ModuleCopies(self._module)

    def _leave_copies(self) -> None:
        """Let copies of the module be split like it, from now on without help."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.follow()
            copies.remove()

    @property
    def _is_split(self) -> bool:
        return self._run is not None and self._run.pipeline.committed

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
        if self._trainer.training and self._trainer.ckpt_path is not None:
            leave_out_seen(dataloader, self._count_seen_batches)
        return dataloader

    def _count_seen_batches(self) -> int:
        """Return how many batches of this epoch a fit that resumes has done."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        return 0 if progress.is_last_batch else progress.current.ready

    # Steps

    @override
    def on_train_start(self) -> None:
        self._parameters.start_training()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context(), self._between_hooks():
            inputs = self._steps.inputs("training_step", args, kwargs)
            microbatches = self.run.cut_training_batch(inputs)
            accumulation = self._accumulation()
            if not self._is_split:
                self._parameters.leave_foreign()
                self._leave_copies()
                self.run.begin_training(accumulation)
            elif self._gradient_hooks is not None:
                self._gradient_hooks.start_batch()
            for microbatch in microbatches:
                microbatch.differentiate = self.backward_of_batch.differentiate
            self._start_batch(len(microbatches), accumulation)
            with sharing_casts(self.root_device), self._counted():
                start = self.backward_of_batch.start
                done = self.run.train(inputs, microbatches, accumulation, start)
            self._log(done)
        return self.backward_of_batch.end(done.value, accumulation)

    def _share_gradient_sizes(self) -> None:
        if self._is_split:
            share_gradient_sizes(self.run.pipeline, self.group)

    def _start_batch(self, num_microbatches: int, accumulation: Accumulation) -> None:
        if self._stop is not None:
            self._stop.start_batch(
                num_microbatches, accumulation.is_last or bool(accumulation.watched_by)
            )

    def _counted(self) -> AbstractContextManager[None]:
        return nullcontext() if self._arrivals is None else self._arrivals.batch()

    def arrive(self) -> None:
        """Pass a place to which all ranks come after as many batches."""
        if self._arrivals is not None:
            self._arrivals.arrive()

    def settle(self) -> None:
        """Let all ranks stop if one of them has set ``trainer.should_stop``; they wait here."""
        self.arrive()
        if self._stop is not None:
            self._stop.settle()

    def _accumulation(self) -> Accumulation:
        num_batches = self._trainer.accumulate_grad_batches
        return Accumulation(
            num_batches,
            is_first=self.backward_of_batch.zero_grad is not None,
            is_last=not self._steps_later,
            watched_by=hooks_between_batches(self._trainer) if num_batches > 1 else (),
        )

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning trains in here on every batch after which it does not step."""
        self._steps_later = True
        try:
            yield
        finally:
            self._steps_later = False

    def finish_accumulating(self) -> None:
        """Run the backwards that are left of batches whose optimizer step is still to come."""
        with self.precision_plugin.train_step_context(), self._between_hooks():
            self.run.finish_plan()

    @contextmanager
    def _between_hooks(self) -> Iterator[None]:
        """Run steps, which leave random numbers as they were, and call modules of their own."""
        forwards = nullcontext() if self._hook_forwards is None else self._hook_forwards.paused()
        with forwards, forked_randomness():
            yield

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._trainer.received_sigterm:  # of Lightning's loops this one does not ask
            raise SIGTERMException
        with self.precision_plugin.predict_step_context():
            return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._between_hooks(), self._counted():
            done = self.run.evaluate(self._steps.inputs(kind, args, kwargs))
            self._log(done)
        return done.value

    def _log(self, done: StepOutput) -> None:
        self._steps.log(done.sizes)
        self._connector.tick(outputs=numbers_in(done.value))

    @property
    def _connector(self) -> SharedMetricsConnector:
        return self._trainer._logger_connector  # type: ignore[return-value]

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._refuse_alone("save_checkpoint")
        if self._is_split:
            return self._state.of_module(whole=not self._saves_folder)
        # Without a seed the ranks' modules differ until they are split.
        state = super().lightning_module_state_dict()
        return state if self.is_global_zero else shapes_of(state, global_rank=0)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._is_split:
            self._state.load_module(checkpoint["state_dict"], strict)
        else:
            super().load_model_state_dict(checkpoint, strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if self._is_split:
            return self._state.of_optimizer(optimizer, whole=not self._saves_folder)
        if not self.is_global_zero:
            return {}
        state = super().optimizer_state(optimizer)
        if not self._saves_folder:
            return state
        return name_optimizer_state(state, self._parameters.names_in(optimizer))

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = MovingCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if self._saves_folder:
            refuse_file_io(io)
        let_move(io)
        self._checkpoint_io = io

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        checkpoint[_SEED] = self._seed
        if self._is_split:
            by_ranks = {"state_dict", "optimizer_states"} if self._saves_folder else set()
            bring_values(checkpoint, by_ranks, self.group)
        if not self._saves_folder:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        refuse_remote_folder(filepath, storage_options)
        write_checkpoint_folder(checkpoint, Path(self.broadcast(filepath)), self.group)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        folder = Path(present(checkpoint_path))
        if not is_checkpoint_folder(folder):
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        else:
            rest = self.checkpoint_io.load_checkpoint(folder / META_FILE, weights_only=weights_only)
            checkpoint = read_checkpoint_folder(
                folder, rest, self.group, weights_only, self._used_places()
            )
        self._loaded_seed = checkpoint.get(_SEED)
        return checkpoint

    def _used_places(self) -> Callable[[Sequence[Any]], bool]:
        """Return a function that says which entries of a checkpoint folder this rank uses."""
        fits = self._trainer.state.fn == TrainerFn.FITTING
        if self._is_split:
            return self._state.own_places(fits)
        return lambda place: fits or place[0] == "model"

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if self._is_split:
            self._state.load_optimizers(states)
            return
        # On the host, as the parameters: what this rank keeps of it follows them.
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    # The end

    @override
    def on_train_end(self) -> None:
        self.finish_accumulating()  # where training has stopped in between
        self.run.finish_checking()
        self.run.end_training()
        if self._requeue is not None:
            self._requeue.end_training(self.group)

    @override
    def on_validation_end(self) -> None:
        if self._trainer.state.fn != TrainerFn.FITTING:  # there the next batch of training does it
            self.run.finish_checking()

    @override
    def on_test_end(self) -> None:
        self.run.finish_checking()

    @override
    def on_predict_end(self) -> None:
        self.run.finish_checking()

    @override
    def _break_off(self) -> None:
        super()._break_off()
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
        for hooks in (self._gradient_hooks, self._end_hooks):  # the last that were wrapped first
            if hooks is not None:
                hooks.remove()
        self._gradient_hooks = self._end_hooks = None
        if self._hook_forwards is not None:
            self._hook_forwards.leave()
            self._hook_forwards = None
        clip_by_own_norm(self.precision_plugin)
        leave_loss_scale(self.precision_plugin)
        super().teardown()

    @override
    def give_back(self) -> None:
        if self._copies is not None:
            self._copies.remove()
            self._copies = None
        if self._local_metrics is not None:
            self._local_metrics.give_back()
            self._local_metrics = None

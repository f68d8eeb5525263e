"""The Lightning strategy: its arguments, and the methods that Lightning calls.

Its bases start and end the processes (``processes/``). It holds the module that is cut, one
:class:`~lightning_pipeoffload.loop.split.Split`, and for a fit or an evaluation one
:class:`~lightning_pipeoffload.loop.fit.Fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

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

from lightning_pipeoffload.checkpoints import (
    BEFORE_FIRST_BATCH,
    AtomicCheckpoints,
    ResumeState,
    load_unsplit,
    read_checkpoint,
    shard_state_dict,
    unsplit_state_dict,
    write_checkpoint,
)
from lightning_pipeoffload.loop import (
    Fit,
    PartedModuleBuilder,
    Split,
    check_run,
    refuse_hooks_reading_shards,
    refusing_several_optimizers,
    refusing_sharded_layers,
)
from lightning_pipeoffload.metrics import SharedMetricsConnector
from lightning_pipeoffload.optimizers import MasterWeights, read_stored_states
from lightning_pipeoffload.planning.limits import Limit
from lightning_pipeoffload.planning.settings import (
    PipelineSettings,
    ScheduleLike,
    check_backend,
    check_flag,
    check_start_method,
    check_timeout,
)
from lightning_pipeoffload.processes import (
    PipelineProcesses,
    describe_module,
    describe_optimizers,
    describe_trainer,
    gather_tensor,
    refuse_differences,
)
from lightning_pipeoffload.runtime import draw_seed, forked_randomness
from lightning_pipeoffload.schedule import Schedule


class _RunSummary(NamedTuple):
    """What a strategy shows of a run."""

    plan: Schedule
    report: dict[str, Any]


class PipeOffloadStrategy(AtomicCheckpoints, PipelineProcesses):
    """Trains an unchanged LightningModule over the stages of a pipeline.

    The module is cut at the entries of its ModuleLists or Sequentials. Each rank runs the module's
    own ``training_step``, of which only its stage's blocks compute. The last stage, with the loss
    and ``self.log``, is on global rank 0.

    Args:
        pipeline_parallel_size: Ranks of one pipeline; "auto": all devices, divided by the replicas.
        data_parallel_size: Replicas of the pipeline, each on its own share of the data; "auto": as
            many as there are devices for, where ``pipeline_parallel_size`` is given, else one.
        tensor_parallel_size: Ranks that share each layer of a stage, by the plan with which
            ``configure_model`` calls torch's ``parallelize_module`` over
            ``self.device_mesh["tensor_parallel"]``; neighbouring global ranks.
        rank_order: Which global ranks are neighbours, and so on one machine: those of a pipeline,
            "pipeline_inner", or the replicas of a stage, "data_inner".
        sharding: What is divided among replicas: "none"; "optimizer": the optimizer's step, its
            state, and gradients once they are averaged. Each replica has those of some of the
            parameters.
        num_microbatches: Slices of one batch along dimension 0; "auto": the smallest divisor of the
            first batch that the schedule allows and that is at least twice the ranks, else the
            largest that it allows.
        num_sequence_slices: Slices of each microbatch along its sequences, on which the blocks of a
            causal model run one after the other in training; each attends to the keys and values of
            those before it. For schedules "seq_1f1b", "seq_zb", "seq_v" and "auto".
        num_chunks: Stages of each rank; "auto": the schedule's own.
        schedule: A name, a :class:`~lightning_pipeoffload.schedule.Schedule`, a callable
            ``(num_ranks, num_microbatches) -> Schedule``, or the path of a .csv file. "auto":
            before the first step each block is measured on microbatches whose results are
            discarded, and the fastest plan that fits is run, of all families, numbers of stages,
            offloads and, under a limit, ways to recompute; zb_h1 under
            ``Trainer(deterministic=True)``.
        offload: Which activations go to the host between F and B, or between B and W: "none",
            "half" or "full" of each rank's, or a share from 0 to 1, stages that live longest
            first; "auto": as few as ``memory_limit`` demands. Planned anew after the first three
            steps, with their measured times.
        recompute: What the backward computes again instead of storing it: "none"; "cheap": norms,
            activations and dropout; "full": the blocks, each once.
        head_weight_grad: The action that computes the weight gradients of the code after the
            blocks: "W", as of all other weights; "B", so that the logits' gradients do not wait for
            W; "auto": W, or what ``schedule="auto"`` finds faster under a memory limit.
        memory_limit: Bytes, or "40GiB", of each device for activations and what waits for W; or a
            list in the order of devices, an entry for each, or for each rank of a pipeline. Where
            no order and offload fits, training is refused with the least limit that does. None:
            what parameters, gradients and optimizer leave of the device; no limit on CPU. Under a
            limit the first three steps, which are measured, run one microbatch at a time.
        host_memory_limit: Bytes, or "64GiB", of host memory that each rank may take for activations
            (or a list, as above) and, with ``optimizer_offload``, optimizer state, masters and
            buffers; None: its share of what the machine, or the container, has left when training
            is set up, but for a reserve. Where it does not suffice, training stops before the
            machine swaps.
        blocks: Name of the ModuleList or Sequential to cut ("model.layers"), or patterns of the
            blocks' names in calling order (``["layer1.*", "layer2.*"]``); None: found.
        split: "auto": balanced by cost; "even"; or the number of blocks of each stage.
        make_microbatches: A callable ``(batch, num_microbatches) -> list`` of so many batches, for
            batches that no dimension cuts: graphs, pixels of many images in one tensor. Of batches
            after the first, and of evaluations, it may return fewer. None: along dimension 0 of
            tensors, and along lists with an entry for each sample.
        microbatch_weight: Weight of a microbatch's loss in the batch's: "samples"; "tokens":
            ``batch["labels"]`` that are not -100, without the first of each sequence where a causal
            model of transformers leaves that out; or a callable of the microbatch. The values that
            steps log and return have the same weights.
        optimizer_sync: What a rank does until it knows the norm by which all clip, or whether
            float16 has overflowed on another: "barrier": it waits; "post_validation": it steps,
            begins the next batch, and takes both back where that was wrong, from copies of weights
            and optimizer state. Without clipping and loss scale no rank waits.
        per_parameter_optimizer: True for an optimizer that is not among the known ones, and whose
            result for a parameter depends on nothing but that parameter's value, gradient and state
            and its group's numbers; else it is refused.
        optimizer_offload: Whether optimizers step on the host, where their state stays: the device
            keeps weights and gradients only.
        master_weights: "float32": the optimizer steps float32 copies of parameters in bfloat16 or
            float16, which are the copies, rounded; checkpoints have the copies. They are where its
            state is. None: it steps parameters as they are.
        compile: Whether to compile each class of block, or the arguments of ``torch.compile`` for
            that; a block that the user has compiled stays as it is. Weight gradients wait for W as
            they do without it.
        gradient_accumulation_fusion: Whether W adds products of bfloat16 or float16 to float32
            gradients in one pass, under mixed precision or ``grad_dtype``. It rounds once instead
            of twice, so that bits differ from autograd's. "auto": where every rank's device can.
            True: as "auto", with a warning where one cannot. False: autograd's rounding.
        derive_lengths: Whether a batch of a new sequence length may skip the trace: its shapes are
            interpolated from lengths that were traced, where these fit a polynomial of degree two.
            False: each new length is traced, which is slower and always right.
        solver_seconds: Limit of the solver of schedule="optpipe", a process of its own at low
            priority while training goes on; better plans are adopted between two steps.
        plan_cache: Folder of plans that were found, by a solver or as the best of all families;
            None: one in the user's cache folder.
        save_distributed_checkpoint: Write a checkpoint as a folder, each rank what it owns, instead
            of as one file from global rank 0. Either kind can be loaded with either setting.
        start_method: How the ranks of one machine start: "fork": as forks of this process, to which
            the trained module, metrics and results come back; None: so in an interactive
            interpreter, such as a notebook's, and elsewhere each runs the script from its start.
        process_group_backend: The backend of ``torch.distributed``; None: gloo on
            CPU, nccl on CUDA.
        timeout: Limit of the process groups: a rank that waits longer than this for another
            one fails.
        accelerator: Passed by the Trainer, as are the following.
        parallel_devices: The devices of this machine.
        cluster_environment: What started the processes.
        checkpoint_io: Writes and reads checkpoints.
        precision_plugin: The precision.

    Raises:
        ValueError: An argument is invalid.
    """

    strategy_name = "pipeoffload"
    _continued = ResumeState()  # what is saved of the entry that runs, or ran last
    _loaded = ResumeState()  # of the last checkpoint
    _masters: MasterWeights | None = None
    _split: Split | None = None
    _making: PartedModuleBuilder  # from setup_environment on
    _fit: Fit | None = None
    _recalled: _RunSummary | None = None  # in an interpreter that has forked the ranks

    def __init__(  # noqa: PLR0913 - the interface
        self,
        pipeline_parallel_size: int | str = "auto",
        data_parallel_size: int | str = 1,
        tensor_parallel_size: int = 1,
        rank_order: str = "pipeline_inner",
        sharding: str = "none",
        num_microbatches: int | str = "auto",
        num_sequence_slices: int = 1,
        num_chunks: int | str = "auto",
        schedule: ScheduleLike = "auto",
        offload: float | str = "auto",  # jsonargparse tries the types from left to right
        recompute: str = "none",
        head_weight_grad: str = "auto",
        memory_limit: Limit = None,
        host_memory_limit: Limit = None,
        blocks: str | Sequence[str] | None = None,
        split: str | Sequence[int] = "auto",
        make_microbatches: Callable[[Any, int], list[Any]] | None = None,
        microbatch_weight: Callable[[Any], float] | str = "samples",
        optimizer_sync: str = "barrier",
        per_parameter_optimizer: bool = False,
        optimizer_offload: bool = False,
        master_weights: str | None = None,
        compile: bool | Mapping[str, Any] = False,
        gradient_accumulation_fusion: bool | str = "auto",
        derive_lengths: bool = True,
        solver_seconds: float = 60.0,
        plan_cache: str | PathLike[str] | None = None,
        save_distributed_checkpoint: bool = False,
        start_method: str | None = None,
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
        check_flag("save_distributed_checkpoint", save_distributed_checkpoint)
        check_start_method(start_method)
        check_backend(process_group_backend)
        check_timeout(timeout)
        self.settings = PipelineSettings(
            pipeline_parallel_size=pipeline_parallel_size,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            rank_order=rank_order,
            sharding=sharding,
            num_microbatches=num_microbatches,
            num_sequence_slices=num_sequence_slices,
            num_chunks=num_chunks,
            schedule=schedule,
            blocks=blocks,
            split=split,
            make_microbatches=make_microbatches,
            microbatch_weight=microbatch_weight,
            optimizer_sync=optimizer_sync,
            per_parameter_optimizer=per_parameter_optimizer,
            optimizer_offload=optimizer_offload,
            master_weights=master_weights,
            offload=offload,
            recompute=recompute,
            head_weight_grad=head_weight_grad,
            memory_limit=memory_limit,
            host_memory_limit=host_memory_limit,
            compile=compile,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
            derive_lengths=derive_lengths,
            solver_seconds=solver_seconds,
            plan_cache=plan_cache,
        )
        self._start_method = start_method
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._save_distributed_checkpoint = save_distributed_checkpoint
        self._at_end, self._after_hooks = ExitStack(), ExitStack()  # of the entry that runs

    @property
    def plan(self) -> Schedule:
        """The plan of a training batch, with B, W and messages as they are run.

        Before the first batch its number of microbatches is provisional.
        """
        return self.split.plan if self._recalled is None else self._recalled.plan

    def report(self, live_bytes: bool = False) -> dict[str, Any]:
        """Describe the pipeline: predictions, in units of an average block, and measurements.

        ``memory`` is what each rank needs, in bytes, computed from shapes and so before the first
        step too: its parameters, gradients, the optimizer's state, activations and messages, which
        add up to its ``device``, and copies of activations (``offloaded``) and what an optimizer
        has there (``host_optimizer``) on its ``host``; None where the step does not run without
        values. With ``optimizer_sync="post_validation"``, ``step_copies`` are in one of
        the two sums, and ``steps_taken_back`` counts those steps. ``devices`` says for each rank
        which device it is on, as the trainer counts them, how many times as long as the fastest it
        takes, and its memory limit; ``better_order`` which order of them would be faster, if any.

        Lists are in pipeline order. Other ranks' entries in ``measured`` are None until training
        has ended. All of it can be written as JSON.

        Args:
            live_bytes: Add ``measured["live_bytes"]``: for each rank and each action of the last
                step the seconds, and the bytes on the device, on the host and between them.

        Raises:
            RuntimeError: Before the first batch, which decides how the module is cut.
        """
        if self._recalled is None:
            return self.split.report.make(live_bytes)
        report = dict(self._recalled.report)
        if "measured" in report and not live_bytes:
            measured = report["measured"]
            report["measured"] = {key: measured[key] for key in measured if key != "live_bytes"}
        return report

    @override
    def summarize_run(self) -> _RunSummary | None:
        """Return what :meth:`restore_run_summary` needs; None where nothing was trained."""
        if self._split is None or not self._split.pipeline.committed:
            return None
        return _RunSummary(self.plan, self.report(live_bytes=True))

    @override
    def restore_run_summary(self, described: _RunSummary | None) -> None:
        """Show the plan and the report of forked ranks from now on; None: go on as before."""
        self._recalled = described or self._recalled

    def gather(self, tensor: Tensor) -> Tensor:
        """Return a copy of a parameter, a buffer or a gradient, whichever rank has its value.

        All ranks call it, in the same order, in hooks. Of a layer that tensor ranks share it
        returns the whole tensor.

        Args:
            tensor: The tensor of the module, or the gradient of one.

        Raises:
            ValueError: It is neither, or the other ranks call it with another one.
            RuntimeError: Inside a step, or after this rank has failed.
        """
        self._refuse_lone_collective("trainer.strategy.gather")
        return gather_tensor(self.split.pipeline, tensor)

    @property
    def split(self) -> Split:
        """This rank's part of the module, with its executor, plans and optimizers.

        Raises:
            RuntimeError: The trainer has not set the strategy up yet for its module.
        """
        if self._split is None:
            raise RuntimeError("there is no pipeline before the trainer has set the strategy up")
        return self._split

    @property
    def _is_split(self) -> bool:
        return self._split is not None and self._split.state.is_split

    @property
    def _is_fitting(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING

    @property
    def _resume_state(self) -> ResumeState | None:
        """What the fit that runs continues; None: it resumes no other."""
        return self._loaded if self._is_fitting and self._trainer.ckpt_path is not None else None

    @property
    def fit(self) -> Fit:
        """The fit or evaluation that runs.

        Raises:
            RuntimeError: None does.
        """
        if self._fit is None:
            raise RuntimeError("there is no run before the trainer has set the strategy up")
        return self._fit

    @property
    @override
    def running_action(self) -> str:
        return self._split.running_action if self._split is not None else ""

    @property
    @override
    def is_in_step(self) -> bool:
        return self._split is not None and self._split.pipeline.is_in_step

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the cut module and the run: a trainer may be saved after a fit."""
        of_a_run = {"_split", "_making", "_fit", "_masters"}
        kept = {k: value for k, value in super().__getstate__().items() if k not in of_a_run}
        return kept | {"_at_end": ExitStack(), "_after_hooks": ExitStack()}

    # A run, in the order in which Lightning calls

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        if self._split is not None and self._split.pipeline.module is not model:
            self._discard_split()

    def _discard_split_if_changed(self) -> None:
        if self._split is not None and not self._split.pipeline.tensors.has_same_layers:
            self._discard_split()

    def _discard_split(self) -> None:
        """Drop what belongs to a module, or to layers, that this trainer has no more."""
        self._split, self._masters = None, self._make_master_weights()
        self.optimizers, self.lr_scheduler_configs = [], []

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._discard_split_if_changed()
        self._masters = self._masters or self._make_master_weights()
        run = self._module, self.group, self.settings
        self._making = PartedModuleBuilder(*run, self.precision_plugin, self._is_fitting)
        self._after_hooks.callback(self._making.release_copies)

    def _make_master_weights(self) -> MasterWeights | None:
        has_masters = self.settings.master_weights is not None
        return MasterWeights(self.settings.optimizer_offload) if has_masters else None

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        if self.settings.tensor_parallel_size > 1 and self._is_fitting:
            refuse_hooks_reading_shards(self._trainer)
        explaining = refusing_sharded_layers(self.settings.tensor_parallel_size)
        with explaining, self._making.running_configure_model(self._split is None):
            yield
        if self._making.has_parts:
            self._discard_split()
        self._discard_split_if_changed()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        check_run(trainer, self.num_replicas, self.settings.tensor_parallel_size)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self._module)
        self.model_to_device()
        entry = self._next_resume_state()
        split = self._make_or_attach_split()
        self._continued = entry._replace(first_batch=split.cutter.first_batch)
        _ = trainer.log_dir  # broadcast once: a step that reads it may run on one rank alone
        run = trainer, split, self.processes, self.cluster_environment, self._making
        assert entry.seed is not None
        self._fit = Fit(*run, entry.seed, self._resume_state, self._at_end, self._after_hooks)
        if self._is_fitting:
            self.setup_optimizers(trainer)
        if self.world_size > 1:
            refuse_differences(self._settings_to_compare(split), self.group.world.host_group)
        self.setup_precision_plugin()

    def _next_resume_state(self) -> ResumeState:
        """Return what an entry begins with: a seed that is drawn, or that of a resumed fit."""
        self.broadcast_random_state()
        with forked_randomness():  # the user's generators give what they give on one device
            return self._continued.next(draw_seed(), self._resume_state)

    def _make_or_attach_split(self) -> Split:
        """Cut the module, or return to the cut of an entry before."""
        split = self._split
        if split is not None:
            split.pipeline.attach()
        else:
            split = self._split = Split(
                self._module,
                self.group,
                self.settings,
                self.root_device,
                self.num_processes,
                self._making.pop_parted_module(),
                self._masters,
                lambda: self.optimizers,
            )
            self._making.update_copies()
        self._at_end.callback(split.leave)
        if self._resume_state is not None:
            split.cutter.restore_first_batch(self._resume_state.first_batch)
        return split

    def _settings_to_compare(self, split: Split) -> dict[str, str]:
        """Return what all ranks have to set alike, by name."""
        saving = {
            "the strategy's save_distributed_checkpoint": str(self._save_distributed_checkpoint)
        }
        described = describe_trainer(self._trainer) | saving
        if not split.pipeline.committed:  # training goes on with what each rank has written
            described |= describe_module(self._module)
        names = split.parameters.names
        return described | describe_optimizers(self.optimizers, names, self.lr_scheduler_configs)

    @override
    def model_to_device(self) -> None:
        """Move metrics; each stage's parameters follow once the first batch was traced."""
        for part in self._module.modules():
            if isinstance(part, Metric):  # its states are neither parameters nor buffers
                part.to(self.root_device)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        with refusing_several_optimizers():
            super().setup_optimizers(trainer)
        self.split.narrow_optimizers()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self._fit is not None:
            self.split.cutter.note_loader(dataloader, self._trainer)
        return dataloader

    @override
    def on_train_start(self) -> None:
        self.fit.configure_step_sync()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # _steps_later is set by block_backward_sync: whether later batches add to the gradients.
        return self.fit.train(args, kwargs, self._steps_later)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with self.fit.boundary.stepping():  # NarrowedOptimizer leaves other ranks' parameters out
            return super().optimizer_step(optimizer, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self.fit.evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self.fit.evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._module.trainer.received_sigterm:  # Lightning's other loops check it
            raise SIGTERMException
        with self.precision_plugin.predict_step_context():
            return self.fit.evaluate("predict_step", args, kwargs)

    @override
    def on_train_end(self) -> None:
        self.fit.end_training()
        self._record_reader_state()

    def _record_reader_state(self) -> None:
        """Note for a checkpoint what the readers have read; all ranks call it together."""
        if self._is_fitting:
            read = self.fit.gather_reader_states()
            self._continued = self._continued._replace(read=read or self._continued.read)

    @override
    def _end_if_common_error(self, is_of_all: bool) -> None:
        super()._end_if_common_error(is_of_all)
        connector = self._trainer._logger_connector
        if isinstance(connector, SharedMetricsConnector):
            connector.abandon()

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._refuse_lone_collective("save_checkpoint")
        if self._is_split:
            if self._fit is not None:
                self._fit.boundary.wait_for_parameters()
            return self.split.state.module_state_dict(self._save_distributed_checkpoint)
        if self.processes.group is not None and self.group.num_tensor_ranks > 1:
            raise RuntimeError(BEFORE_FIRST_BATCH)
        return unsplit_state_dict(self._module, self._masters, self.is_global_zero)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self._split is None:
            return super().optimizer_state(optimizer)
        return self._split.state.optimizer_state_dict(
            plain, by_name=self._save_distributed_checkpoint
        )

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if self._fit is not None:
            self._fit.batch_end.compare_batches()  # before anything is saved
            self._record_reader_state()
        if self.processes.group is None:  # before the first run, or after forks
            if "optimizer_states" in checkpoint:
                self._refuse_without_optimizers()
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        self._continued.write_to(checkpoint)
        if not self._is_split:  # what is not read yet may be in the file that is replaced
            for optimizer in self.optimizers:
                read_stored_states(optimizer)
            if self._masters is not None:
                self._masters.read_loaded_values()
        io = None if self._save_distributed_checkpoint else self.checkpoint_io
        write_checkpoint(checkpoint, filepath, self.group, io, storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        torch.cuda.empty_cache()  # as Lightning's own does
        io = self.checkpoint_io
        checkpoint = read_checkpoint(checkpoint_path, io, weights_only, lambda: self._is_fitting)
        self._loaded = ResumeState.read_from(checkpoint)
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        state = checkpoint["state_dict"]
        if self._is_split:
            self.split.state.load_module(state, strict)
        else:
            load_unsplit(self._module, state, strict)
        if self._masters is not None and self._is_fitting:
            self._masters.keep_loaded(shard_state_dict(state, self._module))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if checkpoint["optimizer_states"]:
            self.split.state.load_optimizers(checkpoint["optimizer_states"])

    # The run's end and that of its last hooks come in either order.

    @override
    def teardown(self) -> None:
        self._fit = None
        self._at_end.close()
        super().teardown()

    @override
    def restore_user_objects(self) -> None:
        super().restore_user_objects()
        self._after_hooks.close()

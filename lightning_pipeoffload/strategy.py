"""The Lightning strategy: Lightning's hooks, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,  # private: as Lightning's own strategies
    _init_dist_connection,  # private: as Lightning's own strategies
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher,  # private: as Lightning's own strategies
)
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeoffload.checkpoint import (
    StateCollector,
    load_module_state,
    load_optimizer_state,
    prune_optimizer,
)
from lightning_pipeoffload.collectives import PipelineGroup
from lightning_pipeoffload.data import own_generators
from lightning_pipeoffload.failure import FailureBoard, connect_store, say
from lightning_pipeoffload.monitor import LogCapture, SharedMetricsConnector, keep_metrics_local
from lightning_pipeoffload.optimization import PipelineOptimization
from lightning_pipeoffload.report import (
    join_measurements,
    measure,
    predict,
    print_measurement,
    print_prediction,
)
from lightning_pipeoffload.runtime.executor import Executor
from lightning_pipeoffload.runtime.microbatch import batch_size, checksum, merge_outputs
from lightning_pipeoffload.runtime.pipeline import CutSettings, Pipeline
from lightning_pipeoffload.runtime.randomness import forked_randomness, mix_seed, seed_all
from lightning_pipeoffload.runtime.stage import Microbatch
from lightning_pipeoffload.runtime.timing import ActionTimer
from lightning_pipeoffload.runtime.transport import PeerLostError
from lightning_pipeoffload.schedule import Schedule
from lightning_pipeoffload.settings import PipelineSettings, ScheduleLike, refuse_unbuilt
from lightning_pipeoffload.steps import StepInputs, StepRunner

_KINDS = ("training_step", "validation_step", "test_step", "predict_step")


class PipeOffloadStrategy(ParallelStrategy):
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
        offload: which activations go to the host. Not built yet.
        recompute: which activations are computed again. Not built yet.
        memory_limit: of a device, for what is planned. Not built yet.
        blocks: name of the ModuleList or Sequential to cut; None: found.
        split: "auto": balanced by cost; "even"; or the number of blocks of each stage.
        microbatch_weight: weight of a microbatch's loss in the batch's: "samples", or a callable of
            the microbatch that returns, say, the number of tokens that count.
        optimizer_sync: when ranks agree on the gradient's norm. Not built yet.
        save_distributed_checkpoint: write a directory instead of a file. Not built yet.
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
        blocks: str | None = None,
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
            offload=offload,
            recompute=recompute,
            memory_limit=memory_limit,
            optimizer_sync=optimizer_sync,
            save_distributed_checkpoint=save_distributed_checkpoint,
        )
        self.settings = PipelineSettings(
            pipeline_parallel_size,
            num_microbatches,
            num_chunks,
            schedule,
            blocks,
            split,
            microbatch_weight,
        )
        self.num_nodes = 1
        self.zero_grad: Callable[[], None] | None = None
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._pipeline: Pipeline | None = None
        self._steps: StepRunner | None = None
        self._measured: dict[str, list[Any]] | None = None
        self._board: FailureBoard | None = None
        self._group_names: list[list[list[str]]] = []
        self._failed = False

    # What is asked of the strategy

    @property
    def plan(self) -> Schedule:
        """The lowered plan of a training batch.

        Raises:
            RuntimeError: before the trainer has set the strategy up.
        """
        if self._steps is None:
            raise RuntimeError("the plan is known once the trainer has set the strategy up")
        return self._steps.plan

    def report(self) -> dict[str, Any]:
        """Describe the pipeline: what is predicted, in units of an average block, and measured.

        Lists are in pipeline order. ``measured`` is of this rank alone until training has ended.

        Raises:
            RuntimeError: before the first batch, which decides how the module is cut.
        """
        if self._pipeline is None or not self._pipeline.stages:
            raise RuntimeError("there is nothing to report before the first batch")
        report = predict(self.plan, self._pipeline)
        if self._measured is not None:
            report["measured"] = self._measured
        elif self._executor.timer.num_steps:
            parts: list[Any] = [None] * self.plan.num_ranks
            parts[self._executor.rank] = self._measure()
            names = parts[self._executor.rank]
            report["measured"] = {n: [p[n] if p else None for p in parts] for n in names}
        return report

    # Processes

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes of this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether replicas share the data, so that Lightning gives each its part."""
        return False

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        num_ranks = self.settings.num_ranks(self.num_nodes * self.num_processes)
        self.settings.provisional_schedule(num_ranks)  # refuses here, before processes start
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        reset_seed()
        self._set_world_ranks()
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout)
        if self._board is None:
            self._make_groups()

    def _set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        global_rank = self.node_rank * self.num_processes + self.local_rank
        self.cluster_environment.set_global_rank(global_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank

    def _make_groups(self) -> None:
        schedule = self.settings.provisional_schedule(self.settings.num_ranks(self.world_size))
        self._group = PipelineGroup(schedule, self.global_rank, self.root_device)
        self._metrics_store = connect_store(self._timeout) if self.world_size > 1 else None
        procs = getattr(self.launcher, "procs", ())
        self._board = FailureBoard(
            connect_store(self._timeout), self.global_rank, self.world_size, procs
        )

    @override
    def barrier(self, name: str | None = None) -> None:
        self._refuse_inside_step("barrier")
        self._group.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._refuse_inside_step("broadcast")
        return self._group.broadcast(obj, src)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        self._refuse_inside_step("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce over the replicas, of which there is one."""
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._refuse_inside_step("reduce_boolean_decision")
        return self._group.agree(decision, all)

    def _refuse_inside_step(self, name: str) -> None:
        if self._steps is not None and self._executor.current is not None:
            raise RuntimeError(
                f"{name}() inside a step would wait for ever: the other ranks have left the step, or "
                f"are not there yet; call it in a hook such as on_train_batch_end"
            )

    # Setting up

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        _refuse_module(self._module, trainer)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._seed = self.broadcast(torch.initial_seed())
        seed_all(mix_seed(self._seed))
        self._attach()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self._join_loops(trainer)

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _attach(self) -> None:
        if self._pipeline is not None and self._pipeline.module is self._module:
            self._pipeline.attach()
            return
        group = self._group
        cut = CutSettings(group.stage_ranks, self.settings.blocks, self.settings.split)
        self._pipeline = Pipeline(self._module, group.rank, cut, self.root_device)
        self._executor = Executor(
            group.rank, self._pipeline.stages, group.transport, ActionTimer(self.root_device)
        )
        self._steps = StepRunner(self._pipeline, self._executor, self.settings, group.num_ranks)
        self._collector = StateCollector(self._pipeline, group)
        self._capture = LogCapture(self._module)

    def _join_loops(self, trainer: Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        loop.automatic_optimization = PipelineOptimization.replacing(loop.automatic_optimization)
        # Private: it would make every rank wait for global rank 0 before each batch.
        loop._broadcast_sigterm_tensor = lambda: _stop_if_told(trainer)
        trainer._logger_connector = SharedMetricsConnector.replacing(
            trainer._logger_connector, self._metrics_store
        )
        keep_metrics_local(trainer)
        self.precision_plugin.clip_grad_by_norm = self._clip_by_global_norm  # type: ignore[method-assign]

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        names = {id(p): name for name, p in self._module.named_parameters()}
        self._group_names = [
            [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]

    @override
    def model_to_device(self) -> None:
        """Nothing: each stage's part moves when the first batch has shown what it needs."""

    @override
    def process_dataloader(self, dataloader: object) -> object:
        own_generators(dataloader, self._seed)
        return dataloader

    # Steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context(), forked_randomness():
            return self._train(self._inputs("training_step", args, kwargs))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate(self._inputs("validation_step", args, kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate(self._inputs("test_step", args, kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluate(self._inputs("predict_step", args, kwargs))

    def _inputs(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepInputs:
        batch, *rest = args
        step = getattr(self._module, kind)

        def call(part: Any) -> Any:
            with self._capture.capturing(keep=self._on_last_stage()):
                return step(part, *rest, **kwargs)

        trainer = self._module.trainer
        position = trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx, *rest
        return StepInputs(kind, batch, call, mix_seed(self._seed, _KINDS.index(kind), *position))

    def _on_last_stage(self) -> bool:
        action = self._executor.current
        return action is not None and action.stage == len(self._group.stage_ranks) - 1

    def _train(self, inputs: StepInputs) -> Any:
        assert self._steps is not None
        check = self._group.start_comparing(checksum(inputs.batch))
        microbatches = self._steps.cut_training_batch(inputs)
        self._commit()
        accumulated = self._module.trainer.accumulate_grad_batches
        shares = self._steps.weigh(microbatches, accumulated)
        for microbatch in microbatches:
            microbatch.differentiate = self._differentiate
        results = self._steps.run(microbatches, True, self._before_backward)
        check(f"batch {self._module.trainer.fit_loop.epoch_loop.batch_idx}")
        self._log(microbatches)
        output = merge_outputs(results, shares) if results else self._no_loss()
        self.precision_plugin.post_backward(_loss_of(output, self._no_loss()), self._module)
        return output

    def _evaluate(self, inputs: StepInputs) -> Any:
        assert self._steps is not None
        check = self._group.start_comparing(checksum(inputs.batch))
        microbatches = self._steps.cut_evaluation_batch(inputs)
        shares = self._steps.weigh(microbatches)
        with forked_randomness():
            results = self._steps.run(microbatches, False)
        check(f"a batch of {inputs.kind}")
        self._log(microbatches)
        return merge_outputs(results, shares) if results else None

    def _no_loss(self) -> Tensor:
        """Stand for the loss on ranks that do not have it."""
        return torch.zeros((), device=self.root_device)

    def _log(self, microbatches: list[Microbatch]) -> None:
        self._capture.replay([batch_size(microbatch.part) for microbatch in microbatches])
        self._module.trainer._logger_connector.tick()

    def _before_backward(self) -> None:
        """Do what Lightning does between a training step and its backward."""
        if self.zero_grad is not None:
            self.zero_grad()
        results = self._executor.results
        loss = _loss_of(results[-1] if results else None, self._no_loss())
        self.precision_plugin.pre_backward(loss, self._module)

    def _differentiate(self, loss: Tensor) -> None:
        self.precision_plugin.backward(loss, self._module, None)

    def _commit(self) -> None:
        """Before the first training step: keep what this rank owns, and agree where ranks share."""
        pipeline = self._pipeline
        assert pipeline is not None
        if pipeline.committed:
            return
        pipeline.commit()
        kept = {id(p) for p in pipeline.canonical_parameters().values()}
        for optimizer in self.optimizers:
            prune_optimizer(optimizer, kept)
        self._group.share(pipeline)
        if self.is_global_zero:
            print_prediction(self.report())

    # Optimization

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any | None = None,
        **kwargs: Any,
    ) -> Any:
        def closure_and_sum() -> Any:
            result = closure()
            self._group.sum_shared_gradients()
            return result

        return super().optimizer_step(optimizer, closure_and_sum, model, **kwargs)

    def _clip_by_global_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm over all stages, tied weights counted once."""
        parameters = list(self.precision_plugin.main_params(optimizer))
        gradients = [p.grad for p in parameters if p.grad is not None]
        counted = [p.grad for p in parameters if p.grad is not None and self._group.counts(p)]
        total = self._group.global_norm(counted)
        if gradients:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, total)

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._pipeline is None or not self._pipeline.committed:
            return super().lightning_module_state_dict()
        return self._collector.module_state()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._pipeline is None or not self._pipeline.committed:
            super().load_model_state_dict(checkpoint, strict)
        else:
            load_module_state(self._module, checkpoint["state_dict"], self._pipeline.names, strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self._pipeline is not None
        if not self._pipeline.committed:
            return super().optimizer_state(optimizer)
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        index = [id(known) for known in self.optimizers].index(id(optimizer))
        return self._collector.optimizer_state(optimizer, self._group_names[index])

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._pipeline is not None
        if not self._pipeline.committed:
            super().load_optimizer_state_dict(checkpoint)
            return
        parameters = self._pipeline.canonical_parameters()
        states = zip(
            self.optimizers, checkpoint["optimizer_states"], self._group_names, strict=True
        )
        for optimizer, state, names in states:
            load_optimizer_state(optimizer, state, names, parameters)

    # The end

    @override
    def on_train_end(self) -> None:
        if self._executor.timer.num_steps:
            self._measured = join_measurements(self._group.gather(self._measure()))
            if self.is_global_zero:
                print_measurement(self.report())

    def _measure(self) -> dict[str, Any]:
        assert self._pipeline is not None
        return measure(self.plan, self._executor, self._pipeline.weight_flops)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        if self._board is None:
            return
        if isinstance(exception, (PeerLostError, dist.DistError)):
            for logger in self._module.trainer.loggers:
                logger.finalize("failed")
            self._board.stop_because_of_others(str(exception).splitlines()[0])
        place = self._place()
        what = f"{type(exception).__name__}: {next(iter(str(exception).splitlines()), '')}"
        if place:
            say(f"global rank {self.global_rank} failed in {place}")
        self._board.report(f"{what} (in {place})" if place else what)

    def _place(self) -> str:
        """Say where the plan is: "stage 3, B of microbatch 5"."""
        action = self._executor.current if self._steps is not None else None
        if action is None:
            return ""
        return f"stage {action.stage}, {action.kind.value} of microbatch {action.microbatch}"

    @override
    def teardown(self) -> None:
        if self._pipeline is not None:
            self._pipeline.detach()
        if self._board is not None and not self._failed:
            connector = self._module.trainer._logger_connector
            if isinstance(connector, SharedMetricsConnector):
                connector.leave()
            self._group.barrier()
        if self._board is not None:
            self._board.stop()
        super().teardown()


def _loss_of(output: Any, default: Tensor) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else default


def _stop_if_told(trainer: Trainer) -> None:
    if trainer.received_sigterm:
        raise SIGTERMException


def _refuse_module(module: LightningModule, trainer: Trainer) -> None:
    """Refuse what cannot be run stage by stage.

    Raises:
        ValueError: says what, and what would do.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if not module.automatic_optimization:
        raise ValueError(
            "manual optimization cannot be pipelined: training_step runs once for every stage and "
            "microbatch, so an optimizer step inside it would run as often; use automatic optimization"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "training_step(self, dataloader_iter) cannot be pipelined: the strategy has to cut each "
            "batch into microbatches; use training_step(self, batch, batch_idx)"
        )

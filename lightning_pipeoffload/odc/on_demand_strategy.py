"""The Lightning strategy ``odc``: sharded data parallelism, synchronized once per minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.init import (
    _materialize_distributed_module,  # private: as Lightning's own strategy
)
from lightning.fabric.utilities.optimizer import (
    _optimizers_to_device,  # private: as Lightning's own strategy
)
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeoffload.checkpoints import (
    AtomicCheckpoints,
    path_or_backup,
    refuse_remote_folder,
    write_checkpoint_folder,
)
from lightning_pipeoffload.loop import (
    count_resumed_batches,
    group_sampler_of,
    make_loader_skip_seen,
    patch_sigterm_handling,
    prevent_distributed_samplers,
    refusing_several_optimizers,
    run_backward_in_step,
)
from lightning_pipeoffload.odc.minibatch_training import MinibatchTraining
from lightning_pipeoffload.odc.on_demand_processes import OnDemandProcesses
from lightning_pipeoffload.odc.on_demand_run import OnDemandRun, check_run
from lightning_pipeoffload.odc.sharding import (
    ShardedGroup,
    gather_full_state,
    is_sharded,
    load_full_state,
    matching_unsharded_steps,
    refuse_optimizers,
    shard,
    share_initial_values,
)
from lightning_pipeoffload.odc.transport import OnDemandTransport, SharedSums, WholeGradients
from lightning_pipeoffload.runtime import replaced
from lightning_pipeoffload.runtime.comm import HostGroup
from lightning_pipeoffload.texts.minibatch import Minibatch, MinibatchCollate, MinibatchSampler
from lightning_pipeoffload.texts.packed_rows import PackedRowsSampler

_SIZE_KEY = "on_demand_minibatch_size"


class OnDemandStrategy(AtomicCheckpoints, OnDemandProcesses):
    """Trains an unchanged LightningModule on texts of uneven length, without waits between layers.

    FSDP2 shards the module. A rank reads weights from their owners when it needs them, and adds
    gradients to their owners' sums when it has them. So ranks with different work wait for each
    other only once per minibatch. The result equals FSDP2's, except for the order of sums.

    Args:
        blocks: The blocks that are gathered one by one: the name of a ModuleList or Sequential
            ("model.layers"), or patterns of the blocks' names (["layer1.*", "layer2.*"]); None:
            found.
        deterministic: Sum whole gradients on each rank and reduce them once per minibatch, always
            in the same order; needs the memory of a whole gradient.
        group_size: The number of ranks that share the parameters; None: those of a machine. Each
            group has a copy of the parameters; groups sum their gradients once per minibatch.
        mp_policy: FSDP2's mixed precision, in addition to Lightning's; None: the parameters' own
            dtype.
        save_distributed_checkpoint: Write a checkpoint as a folder, to which each rank writes its
            shards, instead of one file from global rank 0. Both can be read in any case.
        process_group_backend: The backend of ``torch.distributed``; None: gloo on CPU, nccl on
            CUDA.
        timeout: Limit of the process groups: a rank that waits longer than this for another one
            fails.
    """

    strategy_name = "odc"

    def __init__(
        self,
        blocks: str | Sequence[str] | None = None,
        deterministic: bool = False,
        group_size: int | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._blocks = blocks
        self._deterministic = deterministic
        self._group_size = group_size
        self._policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
        self._run: OnDemandRun | None = None
        self._training: MinibatchTraining | None = None
        self._minibatch_size: int | None = None
        self._saved_size: int | None = None
        self._at_end = ExitStack()

    @property
    @override
    def is_in_step(self) -> bool:
        return self._training is not None and self._training.microbatch is not None

    @property
    @override
    def running_action(self) -> str:
        microbatch = None if self._training is None else self._training.microbatch
        parts = [self._run.running_action if self._run is not None else ""]
        parts += [] if microbatch is None else [f"microbatch {microbatch}"]
        return ", ".join(filter(None, parts))

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module
        check_run(module, trainer)
        _ = trainer.log_dir  # broadcast once: a step that reads it may run on one rank alone
        if not is_sharded(module):
            self.precision_plugin.convert_module(module)
            share_initial_values(module, self._world)
            shard(module, self._blocks, self.device_mesh["data_parallel"], self._policy)
        _materialize_distributed_module(module, self.root_device)
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self._connect(module)
        prevent_distributed_samplers(trainer, self._at_end)
        self._publish_before_evaluations(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            with refusing_several_optimizers():
                self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)
            self._patch_training_loop(trainer)

    @property
    def _world(self) -> HostGroup:
        assert self.processes.world is not None
        return self.processes.world

    def _connect(self, module: LightningModule) -> None:
        size = self._check_group_size(self.world_size)
        shared = self.device_mesh["data_parallel"].get_group()
        rank = self.global_rank % size
        device = self.root_device
        replicas = None if size == self.world_size else self.device_mesh["replicas"].get_group()

        def make_transport(groups: Sequence[ShardedGroup]) -> OnDemandTransport:
            if self._deterministic:
                return WholeGradients(groups, rank, self._shard_ranks, device, shared)
            return SharedSums(groups, rank, self._shard_ranks, device)

        self._run = OnDemandRun(module, self._world, make_transport, replicas)
        self._training = MinibatchTraining(
            module, self.precision_plugin, self._run, self.world_size, device
        )

    def _publish_before_evaluations(self, trainer: Trainer) -> None:
        validation = trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop
        for loop in (*validation, trainer.test_loop, trainer.predict_loop):
            start = partial(self._start_evaluation, loop)
            self._at_end.enter_context(replaced(loop, "on_run_start", start))

    def _patch_training_loop(self, trainer: Trainer) -> None:
        """Run backwards within ``training_step``, and stop without waiting for other ranks."""
        run_backward_in_step(trainer, self._at_end, self._connected_training.set_zero_grad)
        patch_sigterm_handling(trainer, self._at_end)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Check a loader of minibatches, and skip the batches that a resumed epoch has read."""
        sampler = group_sampler_of(dataloader)
        if isinstance(sampler, PackedRowsSampler):
            raise ValueError(
                'PackedRowsSampler packs rows for a pipeline; strategy="odc" reads '
                "batch_sampler=MinibatchSampler(...) with collate_fn=MinibatchCollate(...)"
            )
        collate = getattr(dataloader, "collate_fn", None)
        if sampler is not None and not isinstance(collate, MinibatchCollate):
            raise ValueError(
                "a loader with a MinibatchSampler needs collate_fn=MinibatchCollate(...), which "
                "groups what it reads into microbatches"
            )
        trainer = self._module.trainer
        if trainer.training:
            size = sampler.minibatch_size if isinstance(sampler, MinibatchSampler) else None
            self._minibatch_size = size
            if num_seen := count_resumed_batches(trainer):
                self._refuse_other_minibatches(num_seen)
                make_loader_skip_seen(dataloader, num_seen, self._at_end)
        return dataloader

    def _refuse_other_minibatches(self, num_seen: int) -> None:
        if self._saved_size not in (None, self._minibatch_size):
            raise ValueError(
                f"the checkpoint was written after {num_seen} minibatches of "
                f"{self._saved_size} samples of an epoch, and this loader's have "
                f"{self._minibatch_size}, so they begin elsewhere: choose samples_per_rank such "
                f"that {self._saved_size} samples are shared out to {self.world_size} ranks, or "
                f"resume from the end of an epoch"
            )

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        checkpoint[_SIZE_KEY] = self._minibatch_size
        path = Path(self.broadcast(filepath))
        if not self._save_distributed_checkpoint:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
            return
        refuse_remote_folder(filepath, storage_options)
        write_checkpoint_folder(checkpoint, path, self._world, weights_key="state_dict")

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = path_or_backup(checkpoint_path)
        if Path(path).is_dir():
            with ExitStack() as stack:
                for optimizer in self.optimizers:  # torch takes a step, to have a state
                    stack.enter_context(matching_unsharded_steps(optimizer))
                checkpoint = super().load_checkpoint(path, weights_only)
        else:
            checkpoint = self._load_file(path, weights_only)
        self._saved_size = checkpoint.get(_SIZE_KEY)
        return checkpoint

    def _load_file(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        optimizers, self.optimizers = self.optimizers, []
        try:
            checkpoint = super().load_checkpoint(path, weights_only)
        finally:
            self.optimizers = optimizers
        for optimizer, state in zip(
            optimizers, checkpoint.get("optimizer_states", ()), strict=False
        ):
            load_full_state(optimizer, state)
        return checkpoint

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if not self._save_distributed_checkpoint:
            return gather_full_state(optimizer, keep=self.is_global_zero)
        with matching_unsharded_steps(optimizer):  # torch takes a step, to have a state
            return super().optimizer_state(optimizer)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        move = partial(super().batch_to_device, device=device, dataloader_idx=dataloader_idx)
        if isinstance(batch, Minibatch):
            if not self._module.trainer.training:
                raise ValueError(
                    "a loader of minibatches is for training; give validation, test and predict "
                    "one without MinibatchSampler, which Lightning shares out to the ranks"
                )
            return batch.map(lambda part: move(self.precision_plugin.convert_input(part)))
        return move(batch)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *arguments = (*args, *kwargs.values())
        return self._connected_training.train(batch, arguments, is_last=not self._steps_later)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with matching_unsharded_steps(optimizer):
            output = super().optimizer_step(optimizer, *args, **kwargs)
        self._connected_run.reshard()  # a hook before it may have run a forward
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._connected_run.on_demand():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._connected_run.on_demand():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._connected_run.on_demand():
            return super().predict_step(*args, **kwargs)

    @override
    def on_validation_end(self) -> None:
        self._connected_run.reshard_and_wait()

    @override
    def on_test_end(self) -> None:
        self._connected_run.reshard_and_wait()

    @override
    def on_predict_end(self) -> None:
        self._connected_run.reshard_and_wait()

    def _start_evaluation(self, loop: Any) -> None:
        """Publish weights that hooks before an evaluation may have changed."""
        type(loop).on_run_start(loop)
        self._connected_run.publish()

    @property
    def _connected_training(self) -> MinibatchTraining:
        assert self._training is not None
        return self._training

    @property
    def _connected_run(self) -> OnDemandRun:
        assert self._run is not None
        return self._run

    @override
    def teardown(self) -> None:
        if self._run is not None:
            self._run.end()
        self._run = self._training = None
        self._at_end.close()
        super().teardown()

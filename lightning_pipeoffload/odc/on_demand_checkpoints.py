"""Checkpoints of sharded modules: folders as Lightning's own strategy writes them, and files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map  # private: torch exports no other
from typing_extensions import override

from lightning_pipeoffload.checkpoints.file import present
from lightning_pipeoffload.checkpoints.folder import (
    WholeCheckpoints,
    refuse_remote_folder,
    write_checkpoint_folder,
)
from lightning_pipeoffload.odc.on_demand_processes import OnDemandProcesses
from lightning_pipeoffload.odc.sharding import as_if_whole


class OnDemandCheckpoints(WholeCheckpoints, OnDemandProcesses):
    """Writes checkpoints whole or not at all; a file has the optimizer's state of one device."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        path = Path(self.broadcast(filepath))
        if not self._save_distributed_checkpoint:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
            return
        refuse_remote_folder(filepath, storage_options)
        assert self._world is not None
        write_checkpoint_folder(checkpoint, path, self._world, weights_key="state_dict")

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = present(checkpoint_path)
        if Path(path).is_dir():
            with ExitStack() as stack:
                for optimizer in self.optimizers:  # torch takes a step, to have a state
                    stack.enter_context(as_if_whole(optimizer))
                return super().load_checkpoint(path, weights_only)
        return self._load_file(path, weights_only)

    def _load_file(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        optimizers, self.optimizers = self.optimizers, []
        try:
            checkpoint = super().load_checkpoint(path, weights_only)
        finally:
            self.optimizers = optimizers
        for optimizer, state in zip(
            optimizers, checkpoint.get("optimizer_states", ()), strict=False
        ):
            load_whole_state(optimizer, state)
        return checkpoint

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        if not self._save_distributed_checkpoint:
            return whole_state(optimizer, keep=self.is_global_zero)
        with as_if_whole(optimizer):  # torch takes a step, to have a state
            return super().optimizer_state(optimizer)


def whole_state(optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """Gather the state of an optimizer of shards on the host; all ranks call it.

    Parameters are numbered as in the optimizer, so that other strategies read the state, and this
    one theirs.

    Args:
        optimizer: An optimizer of sharded parameters.
        keep: Whether to return it on this rank; else nothing.
    """
    found = tree_map(partial(_gathered, keep=keep), optimizer.state_dict())
    return found if keep else {}


def load_whole_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load this rank's shards of a whole state into an optimizer of shards."""
    parameters = chain(*(group["params"] for group in optimizer.param_groups))
    numbers = chain(*(group["params"] for group in state["param_groups"]))
    owners = dict(zip(numbers, parameters, strict=False))  # load_state_dict says where they differ
    shards = {
        number: tree_map(partial(_shard_like, owners.get(number)), values)
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": shards})


def _gathered(value: Any, keep: bool) -> Any:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    if not keep:
        return None
    return whole.cpu() if isinstance(whole, Tensor) else whole


def _shard_like(parameter: nn.Parameter | None, value: Any) -> Any:
    """Return this rank's shard of a tensor with the parameter's shape; anything else as it is."""
    sharded = None if parameter is None else parameter.data
    if not isinstance(value, Tensor) or not value.ndim or not isinstance(sharded, DTensor):
        return value
    placements = sharded.placements
    if value.shape != sharded.shape:
        placements = (Replicate(),) * sharded.device_mesh.ndim
    # Without a source nothing is sent: each rank has read all.
    return distribute_tensor(value, sharded.device_mesh, placements, src_data_rank=None)

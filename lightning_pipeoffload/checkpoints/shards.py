"""Checkpoints of layers that tensor ranks share have the whole of each tensor.

A checkpoint therefore loads into any number of tensor ranks, and into the plain module. To a folder
each tensor rank writes its shards, as DTensors, which torch's planner joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map  # private: see runtime/leaves

from lightning_pipeoffload.checkpoints.file import copy_state_dict_metadata
from lightning_pipeoffload.checkpoints.saved_values import to_shape_only
from lightning_pipeoffload.optimizers import GroupNames, number_optimizer_state
from lightning_pipeoffload.runtime import StoredTensor, leaves_of, value_of
from lightning_pipeoffload.runtime.comm import PipelineGroup
from lightning_pipeoffload.runtime.shapes import ShapeOnly, Sharding, local_part, sharding_of
from lightning_pipeoffload.runtime.tensor_parallel import gather_whole

BEFORE_FIRST_BATCH = (
    "the checkpoint was not saved: with tensor_parallel_size above 1 nothing is saved before the "
    "first batch has run; save after it, as ModelCheckpoint does"
)


def join_shards(state: dict[str, Any], module: nn.Module, group: PipelineGroup) -> None:
    """Replace the shards in this rank's part of a state dict; all tensor ranks call it.

    Only the first of them gets the values, on its host, and the others shapes.
    """
    shardings = _shardings_in(module)
    for name in state:
        if name in shardings:
            state[name] = _join_shard(name, state[name], shardings[name], group)


def join_checkpoint_shards(checkpoint: dict[str, Any], group: PipelineGroup) -> dict[str, Any]:
    """Return a checkpoint with the whole of each shard that a callback saves of a copy.

    All ranks call it; values are as by :func:`join_shards`.

    Raises:
        RuntimeError: Tensor ranks save other shards than each other; all ranks raise it.
    """
    if group.num_tensor_ranks == 1:
        return checkpoint
    leaves = [leaf for leaf in leaves_of(checkpoint) if not isinstance(leaf, ShapeOnly)]
    mine = [tuple(leaf.shape) for leaf in leaves if _sharding_if_divided(leaf) is not None]
    of_ranks, size = group.world.gather(mine), group.num_tensor_ranks
    if any(shapes != of_ranks[rank - rank % size] for rank, shapes in enumerate(of_ranks)):
        raise RuntimeError(
            "the checkpoint was not saved: the ranks that share layers save other shards of "
            "weights than each other; have every rank save its state dict, not one alone"
        )
    if not any(of_ranks):
        return checkpoint
    return copy_state_dict_metadata(
        tree_map(partial(_join_leaf, group=group), checkpoint), checkpoint
    )


def _sharding_if_divided(value: Any) -> Sharding | None:
    """Return how tensor ranks divide a tensor; None of what they do not."""
    sharding = sharding_of(value) if isinstance(value, Tensor) else None
    return sharding if sharding is not None and sharding.is_divided else None


def _join_leaf(leaf: Any, group: PipelineGroup) -> Any:
    sharding = _sharding_if_divided(leaf)
    if sharding is None:
        return leaf
    if isinstance(leaf, ShapeOnly):
        return to_shape_only(torch.empty(sharding.shape, dtype=leaf.dtype, device="meta"), 0)
    return _join_shard("a shard", local_part(leaf), sharding, group)


def wrap_shards(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict, which may be of a copy, with its shards as DTensors."""
    placed = dict(state)
    for name, value in state.items():
        sharding = None if isinstance(value, ShapeOnly | DTensor) else _sharding_if_divided(value)
        if sharding is not None:
            placed[name] = _to_dtensor(value, sharding)
    return placed


def shards_in(state: Mapping[str, Any], module: nn.Module) -> dict[str, DTensor]:
    """Return the shards in this rank's part of a state dict, as DTensors."""
    shardings = _shardings_in(module)
    return {name: _to_dtensor(state[name], shardings[name]) for name in state if name in shardings}


def join_optimizer_state(
    name: str,
    parameter: Tensor,
    state: Mapping[str, Any],
    group: PipelineGroup,
    in_shards: bool,
) -> Mapping[str, Any]:
    """Return an optimizer's state of a parameter as that of the whole of it.

    With ``in_shards`` it has DTensors; else as by :func:`join_shards`.
    """
    sharding = _sharding_if_divided(parameter)
    if sharding is None:
        return state
    of_whole = dict(state)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            of_whole[key] = (
                _to_dtensor(value, sharding)
                if in_shards
                else _join_shard(f"{name}.{key}", value, sharding, group)
            )
    return of_whole


def _to_dtensor(part: Tensor, sharding: Sharding) -> DTensor:
    mesh = sharding.mesh
    if part.device.type != mesh.device_type:  # on the host, where it stays
        # Private: a mesh without groups, for nothing is sent.
        mesh = DeviceMesh("cpu", mesh.mesh, _init_backend=False)
    return DTensor.from_local(
        part, mesh, [sharding.placement],
        run_check=False, shape=sharding.shape, stride=sharding.stride,
    )  # fmt: skip


def _join_shard(name: str, part: Tensor, sharding: Sharding, group: PipelineGroup) -> Tensor:
    whole = gather_whole(part, sharding)
    if not group.tensor_rank:
        return whole.cpu()
    shape: Tensor = to_shape_only({name: whole}, group.global_rank - group.tensor_rank)[name]
    return shape


def shard_state_dict(state: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Return a whole state dict with this rank's shards, each read when it is used."""
    parts: Any = copy(state)  # with its attribute: the versions that modules load by
    for name, sharding in _shardings_in(module).items():
        if name in state:
            parts[name] = _shard_lazily(state[name], sharding)
    parts_by_name: Mapping[str, Any] = parts
    return parts_by_name


def shard_optimizer_state(
    state: Mapping[str, Any], names: GroupNames, module: nn.Module
) -> dict[str, Any]:
    """Return an optimizer's state of whole parameters with this rank's shards."""
    numbered, shardings = number_optimizer_state(state, names), _shardings_in(module)
    order = [name for group in names for name in group]
    parts = {
        place: {key: _shard_lazily(value, shardings[order[place]]) for key, value in entry.items()}
        if order[place] in shardings
        else entry
        for place, entry in numbered["state"].items()
    }
    return {**numbered, "state": parts}


def _shardings_in(module: nn.Module) -> dict[str, Sharding]:
    tensors = module.state_dict(keep_vars=True).items()
    shardings = {name: _sharding_if_divided(value) for name, value in tensors}
    return {name: each for name, each in shardings.items() if each is not None}


def _shard_lazily(whole: Any, sharding: Sharding) -> Any:
    if not isinstance(whole, Tensor) or whole.shape != sharding.shape:
        return whole
    meta = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
    return StoredTensor(
        sharding.local_shard_of(meta), lambda: sharding.local_shard_of(value_of(whole)).clone()
    )

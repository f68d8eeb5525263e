"""What a checkpoint of one file has of an optimizer: what it would have on one device.

Parameters are numbered as the optimizer has them, so other strategies read it, and it theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map  # private: torch exports no other


def whole_state(optimizer: Optimizer, keep: bool) -> dict[str, Any]:
    """Gather the state of an optimizer on the host; all ranks call it.

    Args:
        optimizer: An optimizer of sharded parameters.
        keep: Whether this rank is to have it; else it has nothing.
    """
    found = tree_map(partial(_gathered, keep=keep), optimizer.state_dict())
    return found if keep else {}


def load_whole_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Let each rank take its shards of a state, which all of them have read.

    Args:
        optimizer: An optimizer of sharded parameters.
        state: The state of one that has all.
    """
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
    """Return this rank's part of what has the parameter's shape, and all of anything else."""
    sharded = None if parameter is None else parameter.data
    if not isinstance(value, Tensor) or not value.ndim or not isinstance(sharded, DTensor):
        return value
    placements = sharded.placements
    if value.shape != sharded.shape:
        placements = (Replicate(),) * sharded.device_mesh.ndim
    # Without a source nothing is sent: each rank has read all.
    return distribute_tensor(value, sharded.device_mesh, placements, src_data_rank=None)

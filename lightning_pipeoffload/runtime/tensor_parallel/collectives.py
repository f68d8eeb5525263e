"""Collectives of tensor ranks in layers that they share, also in a trace.

Collectives of DTensors return tensors that wait at their first use. Here the caller waits at once,
on an accelerator its stream, so that tensors that leave a stage, are saved or wait for W have their
values. On tensors without values nothing is sent, and results that differ between tensor ranks have
the origin :data:`.OF_SHARD`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional  # private: DTensors call it
from torch.distributed.tensor import DTensor

from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.sharding import OF_SHARD, Sharding
from lightning_pipeoffload.runtime.tensor_parallel.through_host import (
    install_host_collectives,
    remove_host_collectives,
)
from lightning_pipeoffload.runtime.transport import blaming_peers, goes_through_host

_wrap: Any = functional._maybe_wrap_tensor
_from_local, _to_local = DTensor.from_local, DTensor.to_local


def _wait(tensor: Tensor) -> Tensor:
    if isinstance(tensor, ShapeOnly):
        return tensor
    with blaming_peers("lost a rank that shares its layers"):
        return functional.wait_tensor(tensor)


def _from_local_with_origin(*args: Any, **kwargs: Any) -> DTensor:
    made = _from_local(*args, **kwargs)
    _set_origin(made._local_tensor, made)
    return made


def _to_local_with_origin(self: DTensor, **kwargs: Any) -> Tensor:
    local = _to_local(self, **kwargs)
    _set_origin(local, self)
    return local


def _set_origin(local: Tensor, of: DTensor) -> None:
    if isinstance(local, ShapeOnly):
        is_same = all(placement.is_replicate() for placement in of.placements)
        local.origins = local.origins - OF_SHARD if is_same else local.origins | OF_SHARD


def install_collectives(device: torch.device) -> None:
    """Wait for collectives where they are called."""
    if goes_through_host(device):
        install_host_collectives(device.type)
    functional._maybe_wrap_tensor = _wait  # type: ignore[assignment]


def remove_collectives() -> None:
    """Restore torch's own functions."""
    remove_host_collectives()
    functional._maybe_wrap_tensor = _wrap


@contextmanager
def noting_shards() -> Iterator[None]:
    """Mark tensors without values that differ between tensor ranks, within the context.

    A compiler knows torch's own functions only.
    """
    DTensor.from_local = staticmethod(_from_local_with_origin)  # type: ignore[method-assign]
    DTensor.to_local = _to_local_with_origin  # type: ignore[method-assign]
    try:
        yield
    finally:
        DTensor.from_local = staticmethod(_from_local)  # type: ignore[method-assign]
        DTensor.to_local = _to_local  # type: ignore[method-assign]


def gather_whole(part: Tensor, sharding: Sharding) -> Tensor:
    """Return the whole of this rank's part of a divided tensor; all tensor ranks call it."""
    part = part.detach().to(sharding.mesh.device_type).contiguous()  # a master is on the host
    parts = [part.new_empty(part.shape) for _ in range(sharding.mesh.size())]
    with blaming_peers("lost a rank that shares its layers while bringing them together"):
        dist.all_gather(parts, part, group=sharding.mesh.get_group())
    return sharding.joined(parts)

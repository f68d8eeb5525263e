"""Collectives of tensor ranks in layers that they share.

Collectives of DTensors return tensors that wait at their first use. Here the caller waits at once,
on an accelerator its stream, so that tensors that leave a stage, are saved or wait for W have their
values. On tensors without values nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group  # private: by name, as DTensors do
from torch.distributed import _functional_collectives as functional  # private: DTensors call it

from lightning_pipeoffload.runtime import replaced
from lightning_pipeoffload.runtime.comm import goes_through_host, reporting_lost_peers
from lightning_pipeoffload.runtime.shapes import ShapeOnly, Sharding


def _wait(tensor: Tensor) -> Tensor:
    if isinstance(tensor, ShapeOnly):
        return tensor
    with reporting_lost_peers("lost a rank that shares its layers"):
        return functional.wait_tensor(tensor)


def _gather_through_host(part: Tensor, size: int, name: Any) -> Tensor:
    whole = part.new_empty((size * part.shape[0], *part.shape[1:]), device="cpu")
    dist.all_gather_into_tensor(whole, part.cpu(), group=_resolve_process_group(name))
    return whole.to(part.device)


def _reduce_through_host(whole: Tensor, operation: str, size: int, name: Any) -> Tensor:
    group, summed = _resolve_process_group(name), whole.cpu()
    dist.all_reduce(summed, getattr(dist.ReduceOp, operation.upper()), group=group)
    return summed.chunk(size)[group.rank()].to(whole.device)


_KERNELS = {
    "all_gather_into_tensor": _gather_through_host,
    "reduce_scatter_tensor": _reduce_through_host,
}


@contextmanager
def collectives_through_host(device_type: str) -> Iterator[None]:
    """Send the tensors of one type of device through the host's memory, within the context.

    For tests with several processes on one GPU, which NCCL refuses. gloo's own collectives would
    use device addresses as host addresses. Messages between stages take the same way, in
    ``ProcessGroupTransport``.
    """
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, device_type.upper())
    try:
        yield
    finally:
        library._destroy()  # private: torch has no other


@contextmanager
def synchronous_collectives(device: torch.device) -> Iterator[None]:
    """Wait for collectives where they are called, within the context."""
    by_host = collectives_through_host(device.type) if goes_through_host(device) else nullcontext()
    with by_host, replaced(functional, "_maybe_wrap_tensor", _wait):
        yield


def sent_bytes(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> float:
    """Return the bytes that a rank sends around a ring in an operation; 0: it is no collective."""
    if func.namespace != "_c10d_functional" or len(args) == 1:  # which waits
        return 0.0
    size, name = _resolve_process_group(args[-1]).size(), func.overloadpacket.__name__
    tensors = args[0] if isinstance(args[0], list) else args[:1]  # several are coalesced
    is_gathered = name.startswith("all_gather")
    times = 1.0 if is_gathered else (1 + name.startswith("all_reduce")) / size
    return (size - 1) * times * sum(tensor.nbytes for tensor in tensors)


def gather_whole(part: Tensor, sharding: Sharding) -> Tensor:
    """Return the whole of this rank's part of a divided tensor; all tensor ranks call it."""
    part = part.detach().to(sharding.mesh.device_type).contiguous()  # a master is on the host
    parts = [part.new_empty(part.shape) for _ in range(sharding.mesh.size())]
    with reporting_lost_peers("lost a rank that shares its layers while bringing them together"):
        dist.all_gather(parts, part, group=sharding.mesh.get_group())
    return sharding.joined(parts)

"""Collectives of tensor ranks over gloo on an accelerator, by way of the host's memory.

Messages between stages take the same way (``transport.py``): for tests with several processes on
one GPU, which NCCL refuses. gloo's own collectives would use device addresses as host addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group  # private: kernels get a name


def _all_gather(part: Tensor, size: int, name: Any) -> Tensor:
    whole = part.new_empty((size * part.shape[0], *part.shape[1:]), device="cpu")
    dist.all_gather_into_tensor(whole, part.cpu(), group=_resolve_process_group(name))
    return whole.to(part.device)


def _reduce_scatter(whole: Tensor, operation: str, size: int, name: Any) -> Tensor:
    group, summed = _resolve_process_group(name), whole.cpu()
    dist.all_reduce(summed, getattr(dist.ReduceOp, operation.upper()), group=group)
    return summed.chunk(size)[group.rank()].to(whole.device)


_KERNELS = {"all_gather_into_tensor": _all_gather, "reduce_scatter_tensor": _reduce_scatter}


@contextmanager
def collectives_through_host(device_type: str) -> Iterator[None]:
    """Send collectives' tensors of one type of device through the host's memory."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, device_type.upper())
    try:
        yield
    finally:
        library._destroy()  # private: torch has no other

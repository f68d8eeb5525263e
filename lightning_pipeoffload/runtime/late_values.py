"""Asynchronous copies to the host, which are read a batch later without a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_on_accelerator(value: Any) -> bool:
    """Return whether a value is on an accelerator, so that a read would synchronize."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def start_host_copy(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor to the host; return a function that waits for the copy."""
    if not is_on_accelerator(tensor):
        kept = tensor.detach().clone()
        return lambda: kept
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach(), non_blocking=True)
    copied = torch.Event(tensor.device.type)
    copied.record()

    def wait() -> Tensor:
        copied.synchronize()
        return host

    return wait

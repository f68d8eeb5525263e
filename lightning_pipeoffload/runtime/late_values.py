"""What the accelerator computes and the host has to know, without the host waiting for it there.

A copy to the host is started behind what the device was given so far, and asked for later: a batch
later it is there, and nobody has waited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_remote(value: Any) -> bool:
    """Whether a value is on an accelerator, so that whoever asks for it waits."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


def start_reading(tensor: Tensor) -> Callable[[], Tensor]:
    """Start to copy a tensor to the host.

    Returns:
        A function that waits for the copy, and returns it.
    """
    if not is_remote(tensor):
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

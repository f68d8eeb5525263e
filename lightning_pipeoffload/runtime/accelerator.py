"""The accelerator that this process uses, if it uses one."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def accelerator_module() -> Any:
    """Return torch's module of the kind of accelerator that torch was built for, or None."""
    kind = torch.accelerator.current_accelerator()
    return None if kind is None else torch.get_device_module(kind)


def accelerator_in_use() -> Any:
    """Return torch's module of the accelerator that this process has initialized, or None.

    A run on the CPU of a machine that has an accelerator must not initialize it, which takes its
    memory and time, and fails in a forked process.
    """
    module = accelerator_module()
    if module is None:
        return None
    return module if getattr(module, "is_initialized", module.is_available)() else None


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device; one without an index stands for any of its type."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)

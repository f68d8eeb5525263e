"""The accelerator that this process uses, if it uses one."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def accelerator_module() -> Any:
    """Return torch's module of the kind of accelerator that torch was built for; None without."""
    kind = torch.accelerator.current_accelerator()
    return None if kind is None else torch.get_device_module(kind)


def accelerator_in_use() -> Any:
    """Return torch's module of the accelerator; None where this process uses none.

    A run on the CPU of a machine that has one must not start it, which takes memory of it and time,
    and fails in a forked process.
    """
    module = accelerator_module()
    if module is None:
        return None
    return module if getattr(module, "is_initialized", module.is_available)() else None


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device, which without an index is any of its kind."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)

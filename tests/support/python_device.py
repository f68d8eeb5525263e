"""A device made in Python: its tensors have no values, but autograd has a thread for it.

As for any accelerator. torch has one such device a process, for good, so tests fork.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

__threads__: list[int] = []
"""Those in which backwards on the device have run; no name that the pipeline would watch."""


class _Module(_DummyBackendModule):  # type: ignore[misc]
    def is_initialized(self) -> bool:
        return False  # it has no random numbers, nor a clock

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def set_up_device() -> None:
    __threads__.clear()
    if not hasattr(torch, "toy"):  # a CUDA build names CUDA where there is none
        _setup_privateuseone_for_python_backend("toy", _Module())


def _on_device(tensor: Tensor) -> Tensor:
    return torch._C._acc.create_empty_tensor(tensor.shape, tensor.dtype)


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, aside: list[Tensor]) -> Tensor:
        ctx.aside = aside
        ctx.save_for_backward(x)
        aside.append(x.detach())
        return _on_device(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        __threads__.append(threading.get_ident())
        ctx.saved_tensors  # noqa: B018 - in a checkpoint this computes the block again
        return ctx.aside.pop(), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, aside: list[Tensor]) -> Tensor:
        ctx.aside = aside
        return aside.pop()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.aside.append(grad)
        return _on_device(grad), None


def through_device(x: Tensor) -> Tensor:
    """Return x, whose gradient goes through the device's thread."""
    aside: list[Tensor] = []
    return _Back.apply(_There.apply(x, aside), aside)


class Block(nn.Module):
    """A layer whose backward is on the device, or not."""

    def __init__(self, on_device: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.then = through_device if on_device else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x))

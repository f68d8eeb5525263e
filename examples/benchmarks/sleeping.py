"""Computing that takes a given time and no core."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor


class Sleep(torch.autograd.Function):
    """The identity, after a while in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Return a copy after so many seconds."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient after as many."""
        time.sleep(ctx.seconds)
        return gradient, None

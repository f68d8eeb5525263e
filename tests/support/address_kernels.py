"""What stands for a kernel of Triton's: it reads and writes memory by the addresses of tensors."""

import ctypes

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from tests.support.fits import Net

_CTYPES = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


def memory(tensor):
    """Return the memory of a tensor as an array, by its address."""
    of_type = _CTYPES[tensor.dtype] * tensor.numel()
    return np.ctypeslib.as_array(of_type.from_address(tensor.data_ptr()))


def _sigmoid(value):
    return (1 + np.tanh(value / 2)) / 2


class Silu(Function):
    """x * sigmoid(x)."""

    num_runs = 0

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        value = memory(x)
        memory(out)[:] = value * _sigmoid(value)
        Silu.num_runs += 1
        return out

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        out, gradient = torch.empty_like(x), gradient.contiguous()
        value = memory(x)
        part = _sigmoid(value)
        memory(out)[:] = part * (1 + value * (1 - part)) * memory(gradient)
        return out


def silu(x):
    return Silu.apply(x)


class Cubed(Function):
    """x to the power of 3, the gradient of which takes addresses."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.pow(3)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        memory(out)[:] = 3 * memory(x.contiguous()) ** 2 * memory(gradient.contiguous())
        return out


class Gate(nn.Module):
    """Multiplies its input by a weight, and by what a kernel makes of the input without a graph."""

    num_runs = 0

    def __init__(self, width, blocks=()):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 0.5))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        given = x.detach().contiguous()
        gate = torch.empty_like(given)
        memory(gate)[:] = np.tanh(memory(given))
        Gate.num_runs += 1
        return x * self.weight * gate


class KernelNet(Net):
    """The net of the other fits, with kernels in its blocks, its norm and its loss."""

    def __init__(self, has_kernels):
        super().__init__(dropout=0.0, depth=4)
        self.silu = silu if has_kernels else functional.silu
        for block in self.blocks:
            block.forward = self._with_silu(block)

    def _with_silu(self, block):
        return lambda x: x + self.silu(block.linear(x))

    def loss(self, batch):
        hidden = self.silu(self.embed(batch["x"]))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.silu(self.norm(hidden)))
        each = functional.cross_entropy(logits, batch["y"], reduction="none")
        return self.silu(each).mean()


def seeded(has_kernels):
    L.seed_everything(7, verbose=False)
    return KernelNet(has_kernels)

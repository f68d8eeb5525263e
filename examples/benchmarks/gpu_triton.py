"""A kernel of Triton's, which takes addresses as Liger's do, for ``gpu_check.py``."""

# Triton has no types, and is not installed on every machine.
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.benchmarks.gpu_parts import call_step, difference
from examples.benchmarks.gpu_process import in_one_line, needing
from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline

triton: Any = None
with suppress(ImportError):
    import triton
    import triton.language as tl

    @triton.jit
    def _silu(x, out, size, block: tl.constexpr):
        index = tl.program_id(0) * block + tl.arange(0, block)
        value = tl.load(x + index, mask=index < size)
        tl.store(out + index, value * tl.sigmoid(value), mask=index < size)

    @triton.jit
    def _silu_backward(x, grad, out, size, block: tl.constexpr):
        index = tl.program_id(0) * block + tl.arange(0, block)
        value = tl.load(x + index, mask=index < size)
        part = tl.sigmoid(value)
        slope = part * (1 + value * (1 - part)) * tl.load(grad + index, mask=index < size)
        tl.store(out + index, slope, mask=index < size)


class Silu(torch.autograd.Function):
    """x * sigmoid(x), by kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute it."""
        x = x.contiguous()
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        _silu[(triton.cdiv(x.numel(), 256),)](x, out, x.numel(), 256)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Compute the gradient."""
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        grid, grad = (triton.cdiv(x.numel(), 256),), grads[0].contiguous()
        _silu_backward[grid](x, grad, out, x.numel(), 256)
        return out


class Block(nn.Module):
    """A residual block with a kernel, or with torch's own."""

    def __init__(self, has_kernel: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.has_kernel = has_kernel

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return x + self.down(_silu_of(self.up(x), self.has_kernel))


def _silu_of(x: Tensor, has_kernel: bool) -> Tensor:
    return Silu.apply(x) if has_kernel else functional.silu(x)


PLACES = ("before the blocks", "in blocks", "in the final norm", "in the loss")


class Model(nn.Module):
    """Blocks between an embedding, a norm and a loss; kernels are in one of ``PLACES``."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Block(place == PLACES[1]) for _ in range(4))
        self.norm = nn.LayerNorm(64)
        self.place = place

    def _silu(self, x: Tensor, place: str) -> Tensor:
        return _silu_of(x, self.place == place)

    def step(self, x: Tensor) -> Tensor:
        """Return a loss."""
        x = self._silu(self.embed(x), PLACES[0])
        for block in self.blocks:
            x = block(x)
        x = self._silu(self.norm(x), PLACES[2])
        return self._silu(x.square(), PLACES[3]).mean()


@needing("triton")
def triton_kernels(device: torch.device) -> Iterator[str]:
    """Kernels in each place: the gradients are those of torch's own operators."""
    batch = torch.randn(4, 64, device=device)
    expected: dict[str, Tensor] = {}
    num_failed = 0
    for place in ("nowhere", *PLACES):
        torch.manual_seed(0)
        model = Model(place).to(device)
        try:
            pipeline = InProcessPipeline(model, build("zb_h1", 2, 4), call_step)
            pipeline.run(batch, 1)
        except Exception as error:
            num_failed += 1
            yield f"{place}: {in_one_line(error)}"
            continue
        found = {n: g for n, g in pipeline.named_gradients().items() if g is not None}
        expected = expected or found
        error_of_it = difference(found, expected)
        yield f"{place}: gradients differ by {error_of_it:.1e}"
        assert error_of_it < 1e-4
    assert num_failed == 0

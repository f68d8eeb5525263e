"""A Llama layer in slices of its sequence, for ``gpu_check.py``: what shorter kernels cost.

Each slice is a forward and a backward of its own, as ``num_sequence_slices`` runs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.benchmarks.gpu_llama import Size
from examples.benchmarks.gpu_parts import difference
from examples.benchmarks.gpu_process import is_accelerated
from lightning_pipeoffload.runtime.device import synchronized_time
from lightning_pipeoffload.runtime.sequence import (
    BlockOnSlice,
    EarlierSlices,
    SequenceSlice,
    attending_to_slices,
)

_COUNTS, _REPETITIONS = (1, 2, 4, 8), 5
_ROUNDING = 0.05  # of bfloat16


class Layer(nn.Module):
    """A layer without rotary embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, inner = size.width, size.inner
        self.heads = size.heads
        self.first_norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attended = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend causally, and transform each position."""
        read = self.attended(self.first_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = read.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        y = self.second_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _run(layer: Layer, x: Tensor, grad: Tensor, count: int) -> tuple[float, float]:
    """Return the seconds of all slices' F, and of their B and W."""
    length, earlier = x.shape[1], EarlierSlices()
    ends = pairwise(length * number // count for number in range(count + 1))
    slices = [SequenceSlice(index, *each, length) for index, each in enumerate(ends)]
    started = synchronized_time()
    outputs = []
    for part in slices:
        given = part.cut(x, (1,)).requires_grad_()
        outputs.append(BlockOnSlice("the layer", 0, part, earlier).run(layer, given))
    between = synchronized_time()
    for part, output in zip(slices[::-1], outputs[::-1], strict=True):
        edges, gradients = earlier.pop_edges_and_gradients(part)
        torch.autograd.backward((output, *edges), (part.cut(grad, (1,)), *gradients))
    return between - started, synchronized_time() - between


def block_slices(device: torch.device) -> Iterator[str]:
    """A layer in 1, 2, 4 and 8 slices of its sequence: F, and B with W; its gradients are alike."""
    with attending_to_slices(device.type):
        yield from _rows(device)


def _rows(device: torch.device) -> Iterator[str]:
    size = Size.on(device)
    dtype = torch.bfloat16 if is_accelerated(device) else torch.float32
    layer = Layer(size).to(device, dtype)
    x, grad = torch.randn(2, 1, size.sequence, size.width, device=device, dtype=dtype)
    whole: tuple[float, ...] = ()
    expected: dict[str, Tensor] = {}
    for count in _COUNTS:
        _run(layer, x.detach(), grad, count)
        gradients = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
        error = difference(gradients, expected or gradients)
        expected = expected or {name: gradient.clone() for name, gradient in gradients.items()}
        times = [_run(layer, x.detach(), grad, count) for _ in range(_REPETITIONS)]
        layer.zero_grad()
        found = tuple(map(median, zip(*times, strict=True)))
        whole = whole or found
        row = ", ".join(
            f"{kind} {seconds * 1e3:.2f} ms ({seconds / before:.2f})"
            for kind, seconds, before in zip(("F", "B + W"), found, whole, strict=True)
        )
        yield f"{count} slices: {row}; gradients differ by {error:.1e}"
        assert error < _ROUNDING

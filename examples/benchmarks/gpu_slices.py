"""A Llama layer in slices of its sequence, for ``gpu_check.py``: what shorter kernels cost.

Each slice is a forward and a backward of its own. Its attention reads the keys and values of the
slices before it, whose gradients add up until their own backwards, which run in reverse order.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from examples.benchmarks.gpu_llama import Size
from examples.benchmarks.gpu_parts import difference
from examples.benchmarks.gpu_process import is_accelerated
from lightning_pipeoffload.runtime.timing import finished_at

_COUNTS, _REPETITIONS = (1, 2, 4, 8), 5
_ROUNDING = 0.05  # of bfloat16


class Layer(nn.Module):
    """A layer without rotary embedding, which takes earlier slices' keys and values."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, inner = size.width, size.inner
        self.heads = size.heads
        self.first_norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attended = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, earlier: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the layer's output, and the keys and values of this slice in one tensor."""
        read = self.attended(self.first_norm(x)).unflatten(-1, (3, self.heads, -1))
        queries, *own = read.permute(2, 0, 3, 1, 4)
        joined = torch.stack(own)
        keys, values = torch.cat([*earlier, joined], 3)
        mask = causal_lower_right(queries.shape[-2], keys.shape[-2])
        found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        y = self.second_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y)), joined


def _run(layer: Layer, x: Tensor, grad: Tensor, count: int) -> tuple[float, float]:
    """Return the seconds of all slices' F, and of their B and W."""
    started = finished_at()
    runs: list[tuple[Tensor, Tensor, Tensor]] = []
    for part in x.chunk(count, 1):
        output, joined = layer(part.requires_grad_(), [later for *_, later in runs])
        runs.append((output, joined, joined.detach().requires_grad_()))
    between = finished_at()
    for (output, joined, later), given in zip(runs[::-1], grad.chunk(count, 1)[::-1], strict=True):
        tensors, grads = [output], [given]
        if later.grad is not None:
            tensors.append(joined)
            grads.append(later.grad)
        torch.autograd.backward(tensors, grads)
    return between - started, finished_at() - between


def block_slices(device: torch.device) -> Iterator[str]:
    """A layer in 1, 2, 4 and 8 slices of its sequence: F, and B with W; its gradients are alike."""
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

"""Shapes of operations whose meta kernel in torch refuses what their real kernel computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def run_on_meta(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on tensors of the meta device."""
    kernel = _KERNELS.get(func)
    return kernel(*args, **kwargs) if kernel else func(*args, **kwargs)


def _grouped_mm(
    left: Tensor,
    right: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Torch's takes bfloat16 only, and demands the alignment of a GPU's kernel."""
    groups: tuple[int, ...] = ()
    if left.dim() == right.dim():
        groups = (left.shape[0] if left.dim() == 3 else _length(offsets),)
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]), dtype=out_dtype)


def _length(offsets: Tensor | None) -> int:
    return 0 if offsets is None else len(offsets)


_KERNELS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm  # private: what Hugging Face's experts are computed by
}

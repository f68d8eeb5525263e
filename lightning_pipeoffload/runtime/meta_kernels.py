"""Shapes of operations that torch has no kernel for, or one that refuses what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map  # private: see shape_only

aten = torch.ops.aten
_TORCHS_OWN = {"aten", "prims", "prim"}


def run_on_meta(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Any:
    """Run ``func`` on tensors of the meta device.

    Args:
        func: the operation.
        args: of it.
        kwargs: of it.
        device: that the tensors stand for. An operation of the user's own of which only the real
            kernel is known runs there, on zeros.
    """
    kernel = _KERNELS.get(func, func)
    try:
        return kernel(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        if func.namespace in _TORCHS_OWN:
            raise
    args, kwargs = tree_map(lambda leaf: _to_real(leaf, device), (args, kwargs))
    return tree_map(_to_meta, func(*args, **kwargs))


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _to_real(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return torch.zeros_like(leaf, device=device)
    return device if isinstance(leaf, torch.device) else leaf


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

"""Shapes of operations that torch has no kernel for, or one that refuses what they are given."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
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


def remember_on_meta(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Any:
    """Do the same, but return what was returned for the same shapes before, and its memory."""
    key = _key_of(func, args, kwargs)
    if key is None:
        return run_on_meta(func, args, kwargs, device)
    if key not in _results:
        if len(_results) == _MOST_RESULTS:
            _results.clear()
        with torch.inference_mode(False):
            _results[key] = run_on_meta(func, args, kwargs, device)
    return _results[key]


def _key_of(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Return what the result depends on; None if it is no tensor of its own, or too much to ask."""
    if kwargs or not _gives_one_new_tensor(func):
        return None
    found: list[Any] = [func, torch.get_default_dtype()]
    for value in args:
        if isinstance(value, Tensor):
            found += value.shape, value.stride(), value.dtype
        elif value is None or isinstance(value, _PLAIN):
            found += type(value), value
        else:
            return None
    return tuple(found)


@cache
def _gives_one_new_tensor(func: torch._ops.OpOverload) -> bool:
    schema = func._schema
    aliases = [part.alias_info for part in (*schema.arguments, *schema.returns)]
    types = [str(part.type) for part in schema.returns]
    return func.namespace in _TORCHS_OWN and types == ["Tensor"] and not any(aliases)


_PLAIN = (bool, int, float)
_MOST_RESULTS = 4096
_results: dict[tuple[Any, ...], Any] = {}


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

"""Runs operations on the meta device, and caches results by the shapes of the arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.leaves import map_operands

aten = torch.ops.aten
_TORCHS_OWN = {"aten", "prims", "prim"}


def run_on_meta(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    in_new_memory: bool,
) -> Any:
    """Run ``func`` on meta tensors, or return the cached result for the same shapes.

    Args:
        func: The operation.
        args: Its arguments, on the meta device.
        kwargs: Its keyword arguments.
        device: The device of the real tensors. A custom operator without a meta kernel runs there,
            on zeros.
        in_new_memory: Whether each result needs memory of its own.
    """
    key = _key_of(func, args, kwargs)
    if key is not None and key not in _results:
        if len(_results) == _MOST_RESULTS:
            _results.clear()
        with torch.inference_mode(False):
            found = _run(func, args, kwargs, device)
        _results[key] = found if _has_own_memory(found, args) else None
    known = _results.get(key)
    if known is None:
        return _run(func, args, kwargs, device)
    return map_operands(_in_new_memory, known) if in_new_memory else known


def find_result(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the cached result of :func:`run_on_meta` for these shapes; None if there is none."""
    return _results.get(_key_of(func, args, kwargs))


def _run(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Any:
    kernel = _KERNELS.get(func, func)
    try:
        return kernel(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        if func.namespace in _TORCHS_OWN:
            raise
    args, kwargs = map_operands(lambda leaf: _to_real(leaf, device), (args, kwargs))
    return map_operands(_to_meta, func(*args, **kwargs))


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _to_real(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return torch.zeros_like(leaf, device=device)
    return device if isinstance(leaf, torch.device) else leaf


def _key_of(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Return a cache key for a call; None if its result is a view, or has no hashable key."""
    if not gives_new_tensors(func):
        return None
    found: list[Any] = [func, torch.get_default_dtype()]
    for value in (*args, *chain.from_iterable(kwargs.items())):
        if isinstance(value, Tensor):
            found += value.shape, value.stride(), value.dtype
        elif value is None or isinstance(value, _PLAIN):
            found += type(value), value
        elif isinstance(value, (list, tuple)) and all(isinstance(v, _PLAIN) for v in value):
            found += type(value), *map(type, value), *value
        else:
            return None
    return tuple(found)


@cache
def gives_new_tensors(func: torch._ops.OpOverload) -> bool:
    """Return whether, by its schema, an operation makes no views and writes nothing in place."""
    schema = func._schema
    aliases = [part.alias_info for part in (*schema.arguments, *schema.returns)]
    types = {str(part.type) for part in schema.returns}
    return func.namespace in _TORCHS_OWN and types == {"Tensor"} and not any(aliases)


def _has_own_memory(found: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a result shares no memory with the arguments; ``_unsafe_view``'s does."""
    made = found if isinstance(found, tuple) else (found,)
    if not all(isinstance(tensor, Tensor) and _is_plain(tensor) for tensor in made):
        return False
    memory = {tensor.untyped_storage()._cdata for tensor in made}
    given = [value for value in args if isinstance(value, Tensor) and _is_plain(value)]
    return memory.isdisjoint(tensor.untyped_storage()._cdata for tensor in given)


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _in_new_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


_PLAIN = (bool, int, float, str, torch.dtype, torch.layout, torch.device, torch.memory_format)
_MOST_RESULTS = 4096
# One for the process: a result depends on its key alone.
_results: dict[tuple[Any, ...] | None, Any] = {}


def _grouped_mm(
    left: Tensor,
    right: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Torch's meta kernel takes bfloat16 only, and asks for a GPU's alignment."""
    groups: tuple[int, ...] = ()
    if left.dim() == right.dim() == 3:
        groups = (left.shape[0],)
    elif left.dim() == right.dim():
        groups = (0 if offsets is None else len(offsets),)
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]), dtype=out_dtype)


_KERNELS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm  # private: Hugging Face's experts use it
}

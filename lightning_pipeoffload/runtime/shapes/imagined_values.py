"""Values that are made up where none is known, and the sizes that depend on them.

A mixture of experts looks for the tokens of each expert: how many there are only the stage knows
that runs the block. So the block is looked at as if everything was found; what it hands on is
compared with that when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


class Imagined(NamedTuple):
    """A way to make up what is not known.

    Attributes:
        flag: The truth value that every element is, of what is true or false; a number is 1.
    """

    flag: bool


EVERYTHING = Imagined(flag=True)
# Behind the blocks a flag is mostly asked for to see whether something is wrong.
NO_ALARM = Imagined(flag=False)


def make_result(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return what an operation whose sizes depend on values might, on the meta device.

    Args:
        func: One of those that :func:`can_make_result` knows.
        args: The arguments of the operation, on the meta device.
        kwargs: The keyword arguments of the operation.
    """
    return _MAKERS[func](*args, **kwargs)


def can_make_result(func: torch._ops.OpOverload) -> bool:
    """Whether there is a way to make up what an operation returns."""
    return func in _MAKERS


def is_mask(index: Any) -> bool:
    """Whether indexing by it gives as many rows as it has true elements."""
    return isinstance(index, Tensor) and index.dtype in _MASKS


def _find(searched: Tensor) -> Tensor:
    return searched.new_empty((searched.numel(), searched.dim()), dtype=torch.long)


def _index(source: Tensor, indices: Sequence[Tensor | None]) -> Any:
    found: list[Tensor | None] = []
    for index in indices:
        found += _find(index).unbind(1) if is_mask(index) else [index]  # type: ignore[arg-type]
    return aten.index(source, found)


def _select(source: Tensor, mask: Tensor) -> Tensor:
    count = torch.broadcast_shapes(source.shape, mask.shape).numel()
    return source.new_empty((count,))


def _unique(
    source: Tensor, is_sorted: bool = True, inverse: bool = False, *_: Any
) -> tuple[Tensor, ...]:
    count = source.numel()
    places = source.new_empty(source.shape if inverse else (0,), dtype=torch.long)
    return source.new_empty((count,)), places, places.new_empty((count,))


def _unique_consecutive(
    source: Tensor, inverse: bool = False, counts: bool = False, dim: Any = None
) -> tuple[Tensor, ...]:
    if dim is None:
        return _unique(source, True, inverse)
    return _unique_along(source, dim)


def _unique_along(source: Tensor, dim: int, *_: Any) -> tuple[Tensor, ...]:
    places = source.new_empty((source.shape[dim],), dtype=torch.long)
    return source.new_empty(source.shape), places, torch.empty_like(places)


def _count(source: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    # Who names the number of bins expects no more of them.
    length = minlength or source.numel()
    dtype = torch.long if weights is None else weights.dtype
    return source.new_empty((length,), dtype=dtype)


def _repeat(repeats: Tensor, output_size: int | None = None) -> Tensor:
    length = repeats.numel()
    return repeats.new_empty((length if output_size is None else output_size,), dtype=torch.long)


def _one_hot(source: Tensor, num_classes: int = -1) -> Tensor:
    count = num_classes if num_classes >= 0 else 2
    return source.new_empty((*source.shape, count))


_MAKERS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.nonzero.default: _find,
    aten.index.Tensor: _index,
    aten.masked_select.default: _select,
    aten._unique2.default: _unique,  # private: what unique() calls
    aten.unique_consecutive.default: _unique_consecutive,
    aten.unique_dim.default: _unique_along,
    aten.bincount.default: _count,
    aten.repeat_interleave.Tensor: _repeat,
    aten.one_hot.default: _one_hot,
}

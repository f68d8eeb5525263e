"""Values that are made up where none is known, and the sizes that depend on them.

A mixture of experts looks for the tokens of each expert: how many there are only the stage knows
that runs the block. So the block is looked at twice, once as if all were found and once as if
nothing was. What is the same both times does not depend on it.
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
        number: The number that every element is.
        flag: The truth value that every element is, of what is true or false.
        finds_all: Whether a search finds everything, or nothing.
    """

    number: int
    flag: bool
    finds_all: bool


EVERYTHING = Imagined(number=1, flag=True, finds_all=True)
NOTHING = Imagined(number=0, flag=False, finds_all=False)
# Behind the blocks a flag is mostly asked for to see whether something is wrong.
NO_ALARM = Imagined(number=1, flag=False, finds_all=True)


def make_result(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    imagined: Imagined,
) -> Any:
    """Return what an operation whose sizes depend on values might, on the meta device.

    Args:
        func: One of those that :func:`can_make_result` knows.
        args: The arguments of the operation, on the meta device.
        kwargs: The keyword arguments of the operation.
        imagined: The way to make values up.
    """
    return _MAKERS[func](imagined.finds_all, *args, **kwargs)


def can_make_result(func: torch._ops.OpOverload) -> bool:
    """Whether there is a way to make up what an operation returns."""
    return func in _MAKERS


def is_mask(index: Any) -> bool:
    """Whether indexing by it gives as many rows as it has true elements."""
    return isinstance(index, Tensor) and index.dtype in _MASKS


def _find(finds_all: bool, searched: Tensor) -> Tensor:
    count = searched.numel() if finds_all else 0
    return searched.new_empty((count, searched.dim()), dtype=torch.long)


def _index(finds_all: bool, source: Tensor, indices: Sequence[Tensor | None]) -> Any:
    found: list[Tensor | None] = []
    for index in indices:
        found += _find(finds_all, index).unbind(1) if is_mask(index) else [index]  # type: ignore[arg-type]
    return aten.index(source, found)


def _select(finds_all: bool, source: Tensor, mask: Tensor) -> Tensor:
    count = torch.broadcast_shapes(source.shape, mask.shape).numel() if finds_all else 0
    return source.new_empty((count,))


def _unique(
    finds_all: bool, source: Tensor, is_sorted: bool = True, inverse: bool = False, *_: Any
) -> tuple[Tensor, ...]:
    count = source.numel() if finds_all else min(1, source.numel())
    places = source.new_empty(source.shape if inverse else (0,), dtype=torch.long)
    return source.new_empty((count,)), places, places.new_empty((count,))


def _unique_consecutive(
    finds_all: bool, source: Tensor, inverse: bool = False, counts: bool = False, dim: Any = None
) -> tuple[Tensor, ...]:
    if dim is None:
        return _unique(finds_all, source, True, inverse)
    return _unique_along(finds_all, source, dim)


def _unique_along(finds_all: bool, source: Tensor, dim: int, *_: Any) -> tuple[Tensor, ...]:
    length = source.shape[dim]
    shape = list(source.shape)
    shape[dim] = length if finds_all else min(1, length)
    places = source.new_empty((length,), dtype=torch.long)
    return source.new_empty(shape), places, places.new_empty((shape[dim],))


def _count(
    finds_all: bool, source: Tensor, weights: Tensor | None = None, minlength: int = 0
) -> Tensor:
    # Who names the number of bins expects no more of them.
    length = minlength or (source.numel() if finds_all else 0)
    dtype = torch.long if weights is None else weights.dtype
    return source.new_empty((length,), dtype=dtype)


def _repeat(finds_all: bool, repeats: Tensor, output_size: int | None = None) -> Tensor:
    length = repeats.numel() if finds_all else 0
    return repeats.new_empty((length if output_size is None else output_size,), dtype=torch.long)


def _one_hot(finds_all: bool, source: Tensor, num_classes: int = -1) -> Tensor:
    count = num_classes if num_classes >= 0 else 1 + finds_all
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

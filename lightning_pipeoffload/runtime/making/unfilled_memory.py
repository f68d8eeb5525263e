"""Memory of parameters that nothing fills, where initialization is left out say.

What ``torch.empty`` returns is whatever was there. So the first element is marked: whoever fills
the memory writes over the mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pipeoffload.runtime.shapes.operations import written_arguments
from lightning_pipeoffload.runtime.shapes.shape_only import (
    ShapeOnly,
    memory_of,
    shape_only_leaves,
)

aten = torch.ops.aten

_MARK = 0x7FF5  # repeated it is not a number, in any type, and nobody's result
_MAKERS = {
    *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
    *(Tensor.new_empty, Tensor.new_empty_strided),
}
_CHANGES = {aten.mul_, aten.div_, aten.add_, aten.sub_}  # of what is there


class MarkingEmptyMemory(TorchFunctionMode):
    """Marks what ``torch.empty`` and the like return inside."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func``."""
        made = func(*args, **(kwargs or {}))
        if func in _MAKERS and type(made) is Tensor:
            mark(made)
        return made


def mark(tensor: Tensor) -> None:
    """Mark memory that nothing has filled yet, if it is to hold floating-point numbers."""
    if _may_be_marked(tensor):
        _first_of(tensor).view(torch.int16).fill_(_MARK)


def is_marked(tensor: Tensor) -> bool:
    """Whether nothing has filled memory since it was marked."""
    return _may_be_marked(tensor) and bool((_first_of(tensor).view(torch.int16) == _MARK).all())


def begins_with_nan(tensor: Tensor) -> bool:
    """Whether a tensor that was marked, and given another type perhaps, has no value yet."""
    return _may_be_marked(tensor) and bool(_first_of(tensor).isnan().all())


def _may_be_marked(tensor: Tensor) -> bool:
    is_there = not tensor.is_meta and tensor.layout is torch.strided and tensor.numel() > 0
    return is_there and tensor.is_floating_point() and tensor.itemsize > 1


def _first_of(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((1,), (1,))


class UnfilledMemory:
    """The memory of shapes, as far as nothing would have filled it."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}  # elements
        self._kept: list[Tensor] = []  # an address is another's once its owner is gone

    def add(self, shape: ShapeOnly) -> None:
        """Take memory in that is empty."""
        self._left[memory_of(shape)] = shape.numel()
        self._kept.append(shape.meta)

    def holds(self, tensor: Tensor) -> bool:
        """Whether nothing has filled a tensor, or not all of it."""
        if isinstance(tensor, ShapeOnly):
            return self._left.get(memory_of(tensor), 0) > 0
        return is_marked(tensor)

    def see(self, func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """Follow an operation on shapes."""
        if not self._left:
            return
        if any(map(self.holds, shape_only_leaves(args))):
            self._take_in_new(result)
        reads = args if func.overloadpacket in _CHANGES else args[1:]
        if any(map(self.holds, shape_only_leaves(reads))):
            return
        for written in shape_only_leaves(list(written_arguments(func, args))):
            memory = memory_of(written)
            if memory in self._left:  # padding, say, is filled by itself
                self._left[memory] -= written.numel()

    def _take_in_new(self, result: Any) -> None:
        for made in shape_only_leaves(result):
            if memory_of(made) not in self._left:
                self.add(made)

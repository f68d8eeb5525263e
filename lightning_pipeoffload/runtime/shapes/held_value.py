"""Tensors of a step that runs whole on every rank, whose values one rank has: the holder.

A block runs on its owner only. The other ranks get two kinds of tensors:

- :class:`HeldOutput`, what a block returned. All ranks have one, the holder too. When code between
  the blocks reads it, all ranks get the value at once, since all of them run that code.
- :class:`HeldState`, what a block wrote into its arguments or attributes, such as a key-value
  cache. The holder has the plain tensor. Code between the blocks may index or reorder it on all
  ranks, where each does to its own kind what it says; only a block on another rank gets the value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_pipeoffload.runtime import leaves_of
from lightning_pipeoffload.runtime.shapes.shape_only import Awaited, ShapeOnly

_DESCRIBING = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_meta", "is_sparse", "is_nested")),
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "is_leaf", "grad_fn", "grad")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__),
    *(Tensor.storage_offset, Tensor.get_device, Tensor.is_inference, Tensor.ndimension),
    Tensor.itemsize.__get__,  # type: ignore[attr-defined] # a property
}


class HeldValue(Awaited):
    """A tensor whose value its holder has, and other ranks get when code reads it.

    Attributes:
        number: Identifies the value on all ranks.
        holder: The pipeline rank that has it.
        fetch: Gets the value where it can be had now: sets :attr:`value` on all ranks.
    """

    number: int
    holder: int
    fetch: Callable[[HeldValue], None]

    @classmethod
    def create(
        cls,
        like: Tensor,
        device: torch.device,
        origin: str,
        number: int,
        holder: int,
        fetch: Callable[[HeldValue], None],
    ) -> Any:
        """Make the tensor.

        Args:
            like: A tensor of this shape, strides and dtype, with or without a value.
            device: The device that it reports.
            origin: What it is, for messages.
            number: Identifies the value on all ranks.
            holder: The rank that has the value.
            fetch: Gets the value.
        """
        held: Any = cls.of(ShapeOnly.like(like, origin, device=device))
        held.number, held.holder, held.fetch = number, holder, fetch
        return held

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Call ``func`` with values; what only asks for a shape fetches none."""
        if func in _DESCRIBING:  # a third of the host's calls: the stand-in answers
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for leaf in leaves_of((args, kwargs or {})):
            if isinstance(leaf, HeldValue):
                leaf.fetch(leaf)
        return super().__torch_function__(func, types, args, kwargs)

    @override
    def tolist(self) -> Any:
        self.fetch(self)
        return super().tolist()

    @override
    def numpy(self, *, force: bool = False) -> Any:
        self.fetch(self)
        return super().numpy(force=force)

    @override
    def data_ptr(self) -> int:
        self.fetch(self)
        return super().data_ptr()

    @override
    def __format__(self, format_spec: str) -> str:
        self.fetch(self)
        return super().__format__(format_spec)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.fetch(self)
        return self if self.value is None else self.value.__deepcopy__(memo)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the value, a plain tensor, where it is there."""
        self.fetch(self)
        if self.value is None:
            return super().__reduce_ex__(protocol)
        return self.value.__reduce_ex__(protocol)


class HeldOutput(HeldValue):
    """What a block returned on the holder, until all ranks have its value.

    Attributes:
        is_everywhere: Whether all ranks have the value.
    """

    is_everywhere = False
    _is_param = False


class HeldState(HeldValue):
    """What a block of another rank wrote into its arguments or attributes."""

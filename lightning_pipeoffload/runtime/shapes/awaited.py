"""A shape-only tensor whose value comes while the step runs, and who uses it then uses the value.

The step holds on to what it made before the stage's first block: in variables, in lists, in
attributes. None of those can be exchanged, so from the moment at which the value is there, every
torch function that meets the stand-in is called with the value instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map  # private: see runtime/leaves

from lightning_pipeoffload.runtime.leaves import leaves_of
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly


class Awaited(ShapeOnly):
    """Stands for a value that an earlier stage sends.

    Attributes:
        value: None until it has come.
    """

    value: Tensor | None = None

    @classmethod
    def of(cls, leaf: ShapeOnly) -> Awaited:
        """Return a stand-in that is like ``leaf`` until its value comes."""
        made = cls(leaf.meta, leaf.device, leaf.origins)
        assert isinstance(made, Awaited)
        return made

    def receive(self, value: Tensor) -> None:
        """Be ``value`` from now on."""
        if value.requires_grad:
            _Link.apply(value, self)
        self.value = value

    def __format__(self, format_spec: str) -> str:
        return (
            super().__format__(format_spec)
            if self.value is None
            else format(self.value, format_spec)
        )

    def tolist(self) -> Any:
        """Return the values, if they have come."""
        return super().tolist() if self.value is None else self.value.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values, if they have come."""
        return super().numpy() if self.value is None else self.value.numpy(force=force)

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with the values that have come."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*give_values(args), **give_values(kwargs or {}))


def give_values(tree: Any) -> Any:
    """Put values in the place of what stands for them."""
    stands_in = any(isinstance(leaf, Awaited) for leaf in leaves_of(tree))
    return tree_map(_value_of, tree) if stands_in else tree


def _value_of(leaf: Any) -> Any:
    has_come = isinstance(leaf, Awaited) and leaf.value is not None
    return leaf.value if has_come else leaf


class _Link(torch.autograd.Function):
    """Leads gradients of a stand-in to its value.

    An ``autograd.Function`` of the user's takes its arguments as they are, not their values.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, stand_in: Tensor) -> Tensor:
        ctx.mark_dirty(stand_in)
        return stand_in

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None

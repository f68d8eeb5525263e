"""The gradient of a parameter that another rank has: a shape that may know its norm."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_pipeoffload.runtime.leaves import leaves_of
from lightning_pipeoffload.runtime.shapes.known_size import Derived, KnownSize, derive, find_answer
from lightning_pipeoffload.runtime.shapes.operations import written_arguments
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.value_needed import ValueNeededError

GRADIENT_OF = "the gradient of "


class RemoteGradient(ShapeOnly):
    """A gradient without values, or what was computed from it element by element.

    Attributes:
        derived: Of which gradient this is what, such as its magnitude; None: nothing is known of
            it.
    """

    derived: Derived | None = None

    @classmethod
    def of(cls, parameter: ShapeOnly, size: KnownSize | None) -> RemoteGradient:
        """Return the gradient of ``parameter``, of which ``size`` is known."""
        origins = frozenset(GRADIENT_OF + origin for origin in parameter.origins)
        made = cls(parameter.meta, parameter.device, origins)
        made.derived = Derived(size) if size is not None else None
        return made

    @override
    def written_from(self, origins: frozenset[str]) -> None:
        """Stay the gradient that it is."""

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer what is known; note what is written, and what still tells of the gradient."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, RemoteGradient) and first.derived is not None:
            known = first._answer(func, args[1:], kwargs)
            if known is not None:
                return known
        result = super().__torch_dispatch__(func, types, args, kwargs)
        written = list(_gradients_in(written_arguments(func, args, kwargs)))
        for gradient in written:
            gradient._forget()
        return result if written else _derived(func, args, result)

    def _answer(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        assert self.derived is not None
        value = find_answer(func, self.derived, args, kwargs)
        if value is None:
            return None
        shape = func(self.meta, *args, **kwargs)
        if not isinstance(shape, Tensor) or shape.dim():
            return None
        if not self.derived.size.is_current:
            name = func.overloadpacket.__name__
            raise ValueNeededError(f"{name}() after something was written to it", self.origins)
        return torch.full((), value, dtype=shape.dtype, device=self.device)

    def _forget(self) -> None:
        """Forget what was known, of which nothing holds after a write."""
        if self.derived is not None and self.derived.is_memory:
            self.derived.size.is_current = False
        else:
            self.derived = None


def _gradients_in(tree: Iterable[Any]) -> Iterable[RemoteGradient]:
    return (leaf for leaf in leaves_of(list(tree)) if isinstance(leaf, RemoteGradient))


def _derived(func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> Any:
    """Let a result tell what it has to do with a gradient."""
    operands = [arg.derived if isinstance(arg, RemoteGradient) else arg for arg in args]
    found = _derive(func, operands)
    if found is None or type(result) is not ShapeOnly:
        return result
    made = RemoteGradient(result.meta, result.device, result.origins)
    made.derived = found
    return made


def _derive(func: torch._ops.OpOverload, operands: list[Any]) -> Derived | None:
    returned = func._schema.returns
    if returned and returned[0].alias_info is not None:
        return operands[0].view(func) if isinstance(operands[0], Derived) else None
    if not all(isinstance(operand, (Derived, Number)) for operand in operands):
        return None
    return derive(func.overloadpacket, operands)

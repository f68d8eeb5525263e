"""The gradient of a remote parameter: a shape and, if known, its 2-norm and largest magnitude.

The owner computes both as the user's code would, and sends them to the other ranks. Code that
computes one of them, or a result that follows from them such as ``isfinite().all()``, gets the
owner's result, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_pipeoffload.runtime import leaves_of
from lightning_pipeoffload.runtime.shapes.operations import written_arguments
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.step_rules import ValueNeededError

aten = torch.ops.aten


@dataclass
class KnownNorms:
    """The 2-norm and the largest absolute value of a remote gradient.

    ``is_current`` becomes False when something is written to the gradient.
    """

    norm: float
    largest: float
    is_current: bool = True

    def expire(self) -> None:
        """Mark both numbers as outdated, because the gradient has been written."""
        self.is_current = False


@dataclass(frozen=True)
class GradientExpression:
    """Describes a tensor that elementwise operations computed from a gradient of known size.

    Attributes:
        size: The norm and the largest magnitude of the gradient.
        what: "value" is the gradient itself, "part" a view of some of it, "magnitude" its absolute
            value. "number" (not NaN), "bounded" (not infinite), "finite", "nan" and "infinite" are
            masks of the elements with that property.
    """

    size: KnownNorms
    what: str = "value"

    @property
    def is_memory(self) -> bool:
        """Whether the tensor shares memory with the gradient."""
        return self.what in ("value", "part")

    def view(self, func: torch._ops.OpOverload) -> GradientExpression:
        """Return the description of the tensor's view that ``func``, a view operation, returns."""
        return self if func.overloadpacket in _WHOLE_VIEWS else replace(self, what="part")


_WHOLE_VIEWS = {aten.detach, aten.alias, aten.view}
_STEPS = {
    (aten.abs, "value"): "magnitude",
    (aten.isnan, "value"): "nan",
    (aten.isinf, "value"): "infinite",
    (aten.eq, "value", "value"): "number",
    (aten.ne, "value", "value"): "nan",
    (aten.ne, "magnitude", math.inf): "bounded",
    (aten.mul, "number", "bounded"): "finite",
    (aten.logical_not, "finite"): "infinite or nan",
}
# The largest element is NaN if any element is.
_ENDS: dict[tuple[Any, str], Callable[[KnownNorms], float | None]] = {
    (aten.max, "magnitude"): lambda size: size.largest,
    (aten.amax, "magnitude"): lambda size: size.largest,
    (aten.all, "number"): lambda size: not math.isnan(size.largest),
    (aten.all, "finite"): lambda size: math.isfinite(size.largest),
    (aten.any, "nan"): lambda size: math.isnan(size.largest),
    (aten.any, "infinite"): lambda size: _is_infinite(size.largest),
    (aten.any, "infinite or nan"): lambda size: not math.isfinite(size.largest),
}


def _is_infinite(largest: float) -> bool | None:
    return None if math.isnan(largest) else math.isinf(largest)


def derive_expression(
    packet: Any, operands: Sequence[GradientExpression | float]
) -> GradientExpression | None:
    """Return the description of an elementwise operation's result; None if it is unknown."""
    sizes = [each.size for each in operands if isinstance(each, GradientExpression)]
    words = [each.what if isinstance(each, GradientExpression) else each for each in operands]
    what = _STEPS.get((packet, *words))
    is_of_one = all(size is sizes[0] for size in sizes)
    return GradientExpression(sizes[0], what) if what is not None and is_of_one else None


def known_reduction(
    func: torch._ops.OpOverload, of: GradientExpression, args: Sequence[Any], kwargs: dict[str, Any]
) -> float | None:
    """Return the result of a reduction over all elements of ``of``; None if it is unknown."""
    packet = func.overloadpacket
    if packet is not aten.linalg_vector_norm:
        return _ENDS[packet, of.what](of.size) if (packet, of.what) in _ENDS else None
    order = args[0] if args else kwargs.get("ord", 2)
    if of.what not in ("value", "magnitude") or kwargs.get("dtype") is not None:
        return None
    return {2: of.size.norm, math.inf: of.size.largest}.get(order)


GRADIENT_OF = "the gradient of "


class RemoteGradient(ShapeOnly):
    """A gradient without values, or the result of elementwise operations on one."""

    expression: GradientExpression | None = None

    @classmethod
    def of(cls, parameter: ShapeOnly, size: KnownNorms | None) -> RemoteGradient:
        """Make the gradient of ``parameter``; ``size`` is None where its norm is unknown."""
        origins = frozenset(GRADIENT_OF + origin for origin in parameter.origins)
        gradient = cls(parameter.meta, parameter.device, origins)
        gradient.set_norms(size)
        return gradient

    @classmethod
    def of_replica(cls, gradient: Tensor, name: str, replica: int) -> RemoteGradient:
        """Make the gradient of parameter ``name`` that another replica has; its norm is unknown.

        Args:
            gradient: This replica's own gradient, before the sum over replicas.
            name: The name of the parameter.
            replica: The replica that has the sum.
        """
        origin = f"{GRADIENT_OF}{name} (of replica {replica})"
        shape = cls.like(gradient, origin)
        assert isinstance(shape, cls)
        return shape

    def set_norms(self, size: KnownNorms | None) -> None:
        """Set the gradient's norm and largest magnitude; None: they are unknown."""
        self.expression = None if size is None else GradientExpression(size)

    @override
    def update_origins_on_write(self, origins: frozenset[str]) -> None:
        """Do nothing: a written gradient has the same origins."""

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Return a reduction's known result, or a shape-only result with its description.

        A write into the gradient discards its known norm and largest magnitude.

        Raises:
            ValueNeededError: A reduction was known before the gradient was written.
        """
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, RemoteGradient) and first.expression is not None:
            answer = first._answer(func, args[1:], kwargs)
            if answer is not None:
                return answer
        result = super().__torch_dispatch__(func, types, args, kwargs)
        written = list(_gradients_in(written_arguments(func, args, kwargs)))
        for gradient in written:
            gradient._forget()
        return result if written else _with_expression(func, args, result)

    def _answer(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        assert self.expression is not None
        value = known_reduction(func, self.expression, args, kwargs)
        if value is None:
            return None
        shape = func(self.meta, *args, **kwargs)
        if not isinstance(shape, Tensor) or shape.dim():
            return None
        if not self.expression.size.is_current:
            name = func.overloadpacket.__name__
            raise ValueNeededError(f"{name}() after something was written to it", self.origins)
        return torch.full((), value, dtype=shape.dtype, device=self.device)

    def _forget(self) -> None:
        """Discard the known size after a write."""
        if self.expression is not None and self.expression.is_memory:
            self.expression.size.expire()
        else:
            self.expression = None


def _gradients_in(tree: Iterable[Any]) -> Iterable[RemoteGradient]:
    return (leaf for leaf in leaves_of(list(tree)) if isinstance(leaf, RemoteGradient))


def _with_expression(func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> Any:
    """Return the result with its description, if it has one."""
    operands = [arg.expression if isinstance(arg, RemoteGradient) else arg for arg in args]
    description = _expression_of_result(func, operands)
    if description is None or type(result) is not ShapeOnly:
        return result
    gradient = RemoteGradient(result.meta, result.device, result.origins)
    gradient.expression = description
    return gradient


def _expression_of_result(
    func: torch._ops.OpOverload, operands: list[Any]
) -> GradientExpression | None:
    returned = func._schema.returns
    if returned and returned[0].alias_info is not None:
        return operands[0].view(func) if isinstance(operands[0], GradientExpression) else None
    if not all(isinstance(operand, (GradientExpression, Number)) for operand in operands):
        return None
    return derive_expression(func.overloadpacket, operands)

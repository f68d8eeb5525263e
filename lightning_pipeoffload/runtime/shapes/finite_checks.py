"""The outcome of checks for values that are not finite, where a step runs without values.

A step is traced as if all values were finite: else ``if not torch.isfinite(loss).all()`` would take
the branch for a loss that is not, where an ``isnan`` does not. The outcome of such a check, and of
what is computed of outcomes alone, is the same number for all elements of a tensor. So that boxes
and the like pass a check, ``(x1 >= x0).all()`` holds too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_FOUND = {aten.isnan, aten.isinf, aten.isposinf, aten.isneginf}
_COMPARISONS = {aten.eq: False, aten.ne: True, aten.lt: True, aten.le: True}  # with infinity
_SUMS = {aten.sum, aten.count_nonzero}
_ORDERS = {aten.lt, aten.le, aten.gt, aten.ge}
# They run on one element in place of all.
_ELEMENTWISE = {
    aten.logical_not, aten.logical_and, aten.logical_or, aten.bitwise_not, aten.bitwise_and,
    aten.bitwise_or, aten.mul, aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge,
    aten._to_copy, aten.clone, aten.add,
}  # fmt: skip
_SAME = {
    aten.all, aten.any, aten.max, aten.min, aten.amax, aten.amin, aten.mean, aten.view,
    aten.select, aten.slice, aten.expand, aten.unsqueeze, aten.squeeze,
    aten.permute, aten.transpose, aten.t, aten.detach, aten.alias, aten.unbind, aten.stack,
    aten.cat,
}  # fmt: skip


def finite_check_outcome(
    func: torch._ops.OpOverload, args: tuple[Any, ...], known: list[Any], result: Any
) -> float | None:
    """Return what each element of an operation's result is if all values are finite.

    Args:
        func: The operation.
        args: Its arguments.
        known: The outcome of each tensor among them; None for other values.
        result: Its result, without values.

    Returns:
        The element; None if the operation is no such check.
    """
    kind = func.overloadpacket
    if kind in _FOUND:
        return False
    if kind in _COMPARISONS and len(args) == 2:
        if args[0] is args[1] and kind in (aten.eq, aten.ne):
            return kind is aten.eq  # only NaN differs from itself
        if _is_infinity(args[1]):
            return _COMPARISONS[kind]
    if kind is aten.all and args[0].is_order:
        return True
    if not known or None in known:
        return None
    if kind in _SUMS:
        return int(known[0]) * _num_elements(args[0]) // max(1, _num_elements(result))
    if kind in _SAME:
        return known[0] if len({*known}) == 1 else None
    if kind not in _ELEMENTWISE:
        return None
    left = iter(known)
    singles = [torch.tensor(next(left)) if isinstance(a, Tensor) else a for a in args]
    return func(*singles).item() if kind is not aten._to_copy else known[0]


def is_order(func: torch._ops.OpOverload) -> bool:
    """Return whether an operation compares the size of elements."""
    return func.overloadpacket in _ORDERS


def _is_infinity(value: Any) -> bool:
    return isinstance(value, float) and value == math.inf


def _num_elements(tensor: Any) -> int:
    return tensor.numel() if isinstance(tensor, Tensor) else 1

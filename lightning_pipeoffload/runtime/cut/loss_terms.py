"""Follows how a loss depends on the number of samples, in a step that is traced without values.

Every element that the last block returns counts as 1, and what is computed of it as what it would
be then: ``x.sum()`` of n samples is n times as large as a sample's, ``x.sum() / n`` is as large.
So two traces, of the first n and the first m samples of a batch, tell apart::

    loss                               of m samples
    a mean over samples                the same
    a sum                              m / n times as large
    a sum divided by a count           another, where m / n is not the ratio of the counts

What follows no rule of the tables below counts as 1 again where it has as many rows as before, and
else as nothing: a difference may be missed, and none is made up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # private: its documented home

from lightning_pipeoffload.runtime import leaves_of
from lightning_pipeoffload.runtime.shapes import ShapeOnly, shape_only_leaves
from lightning_pipeoffload.runtime.users_code import running_user_line

aten = torch.ops.aten
Terms = Mapping[str, float]
"""What the loss would be, in terms of the lines that sum or divide; "": no line does."""

_CONSTANT: Terms = {"": 1.0}
_NOTHING: Terms = {}
_SUMS = {aten.sum, aten.nansum, aten.histc, aten.bincount}
_SUMS_BY_INDEX = {aten.scatter_add, aten.scatter_add_, aten.index_add, aten.index_add_}
_SELECTIONS = {aten.index, aten.masked_select}
_SUM = 2  # of at::Reduction
_TOTALS = {aten.add, aten.add_, aten.sub, aten.sub_, aten.stack, aten.cat}
_PRODUCTS = {aten.mul, aten.mul_}
_QUOTIENTS = {aten.div, aten.div_}
_SAME = {
    aten.mean, aten.neg, aten.abs, aten.detach, aten.alias, aten.clone, aten._to_copy, aten.view,
    aten._unsafe_view, aten.expand, aten.permute, aten.transpose, aten.t, aten.squeeze,
    aten.unsqueeze, aten.select, aten.slice, aten.where, aten.masked_fill, aten.clamp,
    aten.clamp_min, aten.relu,
}  # fmt: skip


def record_terms(func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
    """Record the terms of an operation's result after the blocks."""
    terms = _terms_of_result(func, args, result)
    for leaf in shape_only_leaves(result):
        leaf.terms = terms  # type: ignore[attr-defined]


def terms_of(value: Any) -> Terms:
    """Return the terms of a tensor or number."""
    if isinstance(value, ShapeOnly):
        return getattr(value, "terms", _CONSTANT)
    number = _number_of(value)
    return _CONSTANT if number is None else {"": abs(number)}


def _terms_of_result(func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> Terms:
    kind = func.overloadpacket
    if kind in _SUMS_BY_INDEX:
        args = (args[3], *args)
    is_sum = kind in _SUMS | _SUMS_BY_INDEX or _sums_a_loss(func, args)
    # The mean of what is selected divides by its number; of a weight it is a table.
    if is_sum or (kind in _SELECTIONS and not getattr(args[0], "is_weight", False)):
        return _scaled(terms_of(args[0]), _num_elements(args[0]) / _num_elements(result))
    if kind in _TOTALS:
        return _total(args)
    if kind in _PRODUCTS:
        return _product(*args[:2])
    if kind in _QUOTIENTS:
        divisor = sum(terms_of(args[1]).values())
        return _scaled(terms_of(args[0]), 1 / divisor) if divisor else _NOTHING
    if kind in _SAME:
        return _total(args)
    return _CONSTANT if kind is aten._ctc_loss or _keeps_rows(args, result) else _NOTHING


def _keeps_rows(args: tuple[Any, ...], result: Any) -> bool:
    rows = {leaf.shape[0] for leaf in shape_only_leaves(args) if leaf.dim()}
    return any(leaf.dim() and leaf.shape[0] in rows for leaf in shape_only_leaves(result))


def _sums_a_loss(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)).get("reduction") == _SUM


def _product(left: Any, right: Any) -> Terms:
    if not isinstance(left, ShapeOnly):
        left, right = right, left
    factor = terms_of(right)
    if not any(terms_of(left)) and not any(factor):
        return {"": sum(terms_of(left).values()) * sum(factor.values())}
    return _scaled(terms_of(left), sum(factor.values()))


def _scaled(terms: Terms, factor: float) -> Terms:
    return {running_user_line(): sum(terms.values()) * factor}


def _total(args: tuple[Any, ...]) -> Terms:
    total: dict[str, float] = {}
    for leaf in shape_only_leaves(args):
        for line, term in terms_of(leaf).items():
            total[line] = total.get(line, 0) + term
    return total


def _number_of(value: Any) -> float | None:
    """Return a number, or the value of a tensor with one element, such as a count."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_meta or value.is_complex():
        return None
    with _disable_current_modes():
        return float(value)


def _num_elements(tree: Any) -> int:
    return max(1, next((leaf.numel() for leaf in leaves_of(tree) if isinstance(leaf, Tensor)), 1))

"""Derives the record of a step for new sequence lengths by interpolating records of traced ones.

Collators pad to the longest text of a batch, so nearly every batch has other lengths, and a trace
takes longer than a batch of a small model. All integers of a record (shapes, strides, operation
counts) are assumed to be polynomials of degree two in the lengths; a product of two lengths, as in
attention, is one. Their coefficients follow from three traces where one length varies, six where
two do. Two further traces verify the assumption: they must equal the interpolated records, which
``min(length, window)`` does not. Before a derived record is first used, the code between the blocks
runs once without values, and has to make the operations that the record has: ``if 14 <= length <=
22`` lies between traced lengths. Lengths are never extrapolated. A length must also be congruent to
the traced ones: ``length // 2`` is a polynomial on the even lengths, so after traces of even
lengths only even ones are derived.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import combinations, combinations_with_replacement
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec  # private: see runtime/leaves

from lightning_pipeoffload.runtime.cut.record import StepRecord

_NUM_FURTHER = 2  # records that those before have to give exactly
# Other leaves than these are alike if their types are.
_COMPARED = (
    *(bool, float, complex, str, bytes, frozenset, torch.dtype, torch.device, TreeSpec),
    torch._ops.OperatorBase,  # private: the base of all operations
)

Lengths = tuple[int, ...]
"""The sizes of all dimensions but the first of a microbatch's tensors, such as sequence lengths."""


@lru_cache
def split_lengths(signature: tuple[Any, ...]) -> tuple[Hashable, Lengths]:
    """Split the shapes of a microbatch, from ``shape_signature``, into (form, lengths).

    The lengths are the sizes of all dimensions but the first, which counts samples. Microbatches
    with the same form differ only in their lengths.
    """
    form: list[Any] = []
    lengths: list[int] = []
    for entry in signature:
        shape = entry[0] if isinstance(entry, tuple) else None
        if isinstance(shape, tuple) and all(isinstance(size, int) for size in shape):
            form.append((*shape[:1], len(shape), entry[1]))
            lengths += shape[1:]
        else:
            form.append(entry)
    return tuple(form), tuple(lengths)


class RecordFamily:
    """Records of one kind of step for microbatches that differ only in their lengths.

    Interpolates the records of further lengths, see the module.
    """

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._lengths: list[Lengths] = []
        self._span = _Span()
        self._base: list[list[int]] = []  # the numbers of records that give the others
        self._first: StepRecord | None = None
        self._form: Any = None
        self._num_further = 0
        self._checked: set[int] = set()  # those of the base that give a further record

    def add(self, lengths: Lengths, record: StepRecord) -> None:
        """Add the record traced at ``lengths``.

        If it differs from the record interpolated from earlier ones, these are dropped: the step
        is no polynomial in its lengths.
        """
        if lengths in self._lengths or record.sizes.until is not None:
            return
        numbers: list[int] = []
        form = record.structure, _flatten(record.length_dependent_values, numbers)
        weights = self._span.weigh(_monomials(lengths))
        if self._first is not None and not self._is_reproduced(form, numbers, weights):
            self._restart()
            weights = None
        self._lengths.append(lengths)
        if weights is None:
            if self._first is None:
                self._first, self._form = record, form
            self._span.add(_monomials(lengths))
            self._base.append(numbers)
        else:
            self._num_further += 1
            self._checked |= _used(weights)

    def replace_base_record(self, record: StepRecord, complete: StepRecord) -> None:
        """Derive further records from a more complete one, if they are derived from ``record``."""
        if self._first is record:
            self._first = complete

    def _is_reproduced(self, form: Any, numbers: list[int], weights: list[Fraction] | None) -> bool:
        return form == self._form and (weights is None or self._sum(weights) == numbers)

    def _sum(self, weights: Sequence[Fraction]) -> list[int] | None:
        """Return the weighted sum of the base's numbers; None if it is not whole."""
        common = math.lcm(*(weight.denominator for weight in weights))
        used = [
            (int(weight * common), numbers)
            for weight, numbers in zip(weights, self._base, strict=True)
            if weight
        ]
        factors = [factor for factor, _ in used]
        sums = [
            sum(map(int.__mul__, factors, column))
            for column in zip(*(numbers for _, numbers in used), strict=True)
        ]
        if any(total % common for total in sums):
            return None
        return [total // common for total in sums]

    def derive(self, lengths: Lengths) -> StepRecord | None:
        """Return the record interpolated for these lengths; None: the step has to be traced."""
        if self._num_further < _NUM_FURTHER or not self._is_in_traced_range(lengths):
            return None
        weights = self._span.weigh(_monomials(lengths))
        if weights is None or not _used(weights) <= self._checked:
            return None
        numbers, first = self._sum(weights), self._first
        if numbers is None or first is None:
            return None
        return first.with_length_values(
            _with_numbers(first.length_dependent_values, iter(numbers)), lengths=lengths
        )

    def _is_in_traced_range(self, lengths: Lengths) -> bool:
        """Whether lengths lie within the traced range, in its steps.

        That holds for each length, and for the sum and difference of each two. They differ from the
        traced values by multiples of the step that these have in common: from even lengths alone
        no odd one is derived.
        """
        columns = dict.fromkeys(zip(lengths, *self._lengths, strict=True))
        for length, *traced in _compared([*columns]):
            if not min(traced) <= length <= max(traced):
                return False
            step = math.gcd(*(each - traced[0] for each in traced))
            if step and (length - traced[0]) % step:
                return False
        return True


def _used(weights: Sequence[Fraction]) -> set[int]:
    return {index for index, weight in enumerate(weights) if weight}


def _monomials(lengths: Lengths) -> list[int]:
    ones = 1, *lengths
    return [a * b for a, b in combinations_with_replacement(ones, 2)]


def _compared(columns: list[Lengths]) -> Iterator[Iterable[int]]:
    """Yield the numbers that steps compare: lengths, and sums and differences of two."""
    yield from columns
    for a, b in combinations(columns, 2):
        yield map(int.__add__, a, b)
        yield map(int.__sub__, a, b)


@dataclass
class _Reduced:
    pivot: int
    row: list[Fraction]
    weights: list[Fraction]  # by which it is a sum of the rows


class _Span:
    """The weighted sums of some rows, which are independent."""

    def __init__(self) -> None:
        self._reduced: list[_Reduced] = []

    def weigh(self, row: Sequence[int]) -> list[Fraction] | None:
        """Return the weights of the rows whose weighted sum is ``row``; None: there are none."""
        rest, weights = self._reduce(row)
        return None if any(rest) else weights

    def add(self, row: Sequence[int]) -> None:
        """Add a row that is no such sum."""
        rest, weights = self._reduce(row)
        pivot = next(place for place, number in enumerate(rest) if number)
        negated = [-weight for weight in weights]
        self._reduced.append(_Reduced(pivot, rest, [*negated, Fraction(1)]))

    def _reduce(self, row: Sequence[int]) -> tuple[list[Fraction], list[Fraction]]:
        rest = [Fraction(number) for number in row]
        weights = [Fraction(0)] * len(self._reduced)
        for reduced in self._reduced:
            factor = rest[reduced.pivot] / reduced.row[reduced.pivot]
            if factor:
                rest = [a - factor * b for a, b in zip(rest, reduced.row, strict=True)]
                for index, weight in enumerate(reduced.weights):
                    weights[index] += factor * weight
        return rest, weights


def _flatten(tree: Any, numbers: list[int]) -> Any:
    """Return the form of a tree without its whole numbers, which are appended to ``numbers``."""
    kind = type(tree)
    if kind is int:
        numbers.append(tree)
        return kind
    if isinstance(tree, Tensor):
        return object()  # like no other
    parts = _parts_of(tree)
    if parts is not None:
        keys = (*tree,) if kind is dict else ()
        return kind, keys, *[_flatten(part, numbers) for part in parts]
    return tree if isinstance(tree, _COMPARED) else kind


def _with_numbers(tree: Any, numbers: Iterator[int]) -> Any:
    """Return a copy of a tree with other whole numbers."""
    kind: Any = type(tree)
    if kind is int:
        return next(numbers)
    parts = _parts_of(tree)
    if parts is None:
        return tree
    filled = [_with_numbers(part, numbers) for part in parts]
    if kind is dict:
        return dict(zip(tree, filled, strict=True))
    if is_dataclass(tree):
        names = [field.name for field in fields(tree)]
        return replace(tree, **dict(zip(names, filled, strict=True)))  # type: ignore[type-var]
    return kind(*filled) if hasattr(kind, "_fields") else kind(filled)


def _parts_of(tree: Any) -> list[Any] | None:
    if isinstance(tree, (list, tuple)):
        return [*tree]
    if type(tree) is dict:
        return [*tree.values()]
    if is_dataclass(tree) and not isinstance(tree, (type, TreeSpec)):
        return [getattr(tree, field.name) for field in fields(tree)]
    return None

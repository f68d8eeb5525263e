"""Cutting of batches: which parts of them have an entry for each sample.

Tensors and arrays have a row for each sample, or one row for all. A list may have an entry for each
sample, hold columns, or be the same for all samples; the first batch that is cut decides which, for
each place, and later batches follow::

    {"image": images[8, ...], "target": [{"boxes": boxes[5, 4]}, ...]}    cut along 8 entries
    [images[8, ...], labels[8]]                                          columns, each cut
    {"image": images[8, ...], "classes": ["cat", "dog"]}                  the same for all
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Complex
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_pipeoffload.runtime.batch.tree import (
    container_entries,
    field_names,
    is_column,
    is_list,
    places_in,
    rebuild,
    tensors_of_object,
)

_INSTEAD = "or give the strategy make_microbatches, which cuts batches as you say"


class BatchParts(NamedTuple):
    """The parts of a batch that make microbatches.

    Attributes:
        parts: The parts.
        sizes: The number of samples of each.
        are_alike: Whether parts of as many samples have the same shapes.
    """

    parts: list[Any]
    sizes: list[int]
    are_alike: bool


@dataclass
class Collation:
    """How batches are collated, which decides where a list may be of samples or of columns.

    Attributes:
        by_torch: Whether ``default_collate`` makes all of them, whose lists hold columns.
        sizes: The batch sizes of other loaders.
    """

    by_torch: bool = False
    sizes: set[int] = field(default_factory=set)

    def choose_num_samples(self, entries: int, rows: int) -> int | None:
        """Return whether a batch has ``entries`` or ``rows`` samples; None: either is possible.

        Args:
            entries: The number of entries of its outermost list.
            rows: The number of rows that the tensors in that list share.
        """
        if self.by_torch:
            return rows
        if entries == rows or rows == 1 or not self.sizes:
            return None
        for fitting in (self.sizes.__contains__, max(self.sizes).__ge__):
            likely = [number for number in (entries, rows) if fitting(number)]
            if len(likely) == 1:
                return likely[0]
        return None


def batch_size(batch: Any, default: int | None = None) -> int:
    """Return the number of samples: the rows that all tensors share, or the entries of its lists.

    Args:
        batch: The batch.
        default: Returned in place of an error.

    Raises:
        ValueError: Lengths along dimension 0 differ, or nothing in the batch has a length.
    """
    try:
        return BatchStructure().count(batch)
    except ValueError:
        if default is None:
            raise
        return default


def tokens_in(batch: Any) -> int | Tensor | None:
    """Return how many tokens a batch has, without waiting for an accelerator.

    Those that ``attention_mask`` lets through, else the size of ``input_ids``; None: it has none.
    """
    if not isinstance(batch, Mapping):
        return None
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, Tensor):
        return None
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return mask.count_nonzero()
    return ids.numel()


class BatchStructure:
    """Whether lists of one step's batches have an entry for each sample, by the first cut batch.

    Args:
        collation: How batches are collated.
        lists: Decisions made already; see below.

    Attributes:
        lists: Whether the list at a place such as ``batch['targets']`` has an entry for each
            sample.
    """

    def __init__(
        self, collation: Collation | None = None, lists: dict[str, bool] | None = None
    ) -> None:
        self._collation = collation or Collation()
        self.lists = {} if lists is None else lists

    def count(self, batch: Any) -> int:
        """Return the number of samples of a batch.

        Raises:
            ValueError: Lengths along dimension 0 differ, or nothing in the batch has a length.
        """
        return self.samples_of(batch).num

    def split(self, batch: Any, size: int) -> BatchParts:
        """Split a batch into parts; see :meth:`Samples.split`."""
        return self.samples_of(batch).split(size)

    def samples_of(self, batch: Any) -> Samples:
        """Return the samples of a batch; raises as :meth:`count` does."""
        return Samples(batch, self.lists, self._make_sample_counter(batch))

    def _make_sample_counter(self, batch: Any) -> _SampleCounter:
        counter = _SampleCounter(self.lists, batch, self._collation)
        if isinstance(batch, list) and "batch" not in self.lists and _is_uniform(batch):
            try:
                rows = counter.count()
            except ValueError:  # it has no columns, so it is a list of samples
                rows = 0
            if (
                not rows
                or self._collation.choose_num_samples(len(batch), rows) == len(batch) != rows
            ):
                self.lists["batch"] = True
                return self._make_sample_counter(batch)
        return counter


class Samples:
    """The samples of one batch.

    Attributes:
        num: Their number.
    """

    def __init__(self, batch: Any, lists: dict[str, bool], counter: _SampleCounter) -> None:
        self._batch, self._lists, self._counter = batch, lists, counter
        self.num = counter.count()

    def split(self, size: int) -> BatchParts:
        """Split the batch into parts of ``size`` samples, the last one possibly smaller.

        Raises:
            ValueError: Whether a list has an entry for each sample cannot be determined.
        """
        sizes = [min(size, self.num - start) for start in range(0, self.num, size)]
        if len(sizes) < 2:
            return BatchParts([self._batch], sizes, are_alike=True)
        split = _Split(self._lists, size, self.num, self._counter)
        return BatchParts(split.parts(self._batch, "batch"), sizes, split.are_alike)


class _SampleCounter:
    """The lengths in a batch that may be its number of samples."""

    def __init__(self, lists: Mapping[str, bool], batch: Any, collation: Collation) -> None:
        self._lists, self._name, self.collation = lists, type(batch).__name__, collation
        self._rows: dict[str, int] = {}  # of tensors, and of lists with an entry for each sample
        self._unclear: dict[str, Any] = {}  # the outermost lists that no batch has decided on
        self.is_by_lists = False  # no tensor counts the samples
        self.is_by_entries = False  # nor do rows of tensors in lists
        self._scan(batch, "batch")

    def _scan(self, tree: Any, place: str) -> None:
        _refuse_layout(tree, place)
        if isinstance(tree, Tensor | np.ndarray):
            if tree.ndim:
                self._rows[place] = len(tree)
            return
        if is_list(tree):
            has_entries = self._lists.get(place)
            if has_entries:
                self._rows[place] = len(tree)
                return
            if has_entries is None and (place != "batch" or is_column(tree)):
                self._unclear[place] = tree
                return
        if not is_column(tree):
            for part, inner in zip(
                container_entries(tree) or (), places_in(tree, place), strict=True
            ):
                self._scan(part, inner)

    def count(self) -> int:
        rows = {place: length for place, length in self._rows.items() if length != 1}
        if len({*rows.values()}) > 1:
            _refuse_unlike_lengths(rows)
        if self._rows:
            return next(iter(rows.values()), 1)
        self.is_by_lists = bool(self._unclear)
        num_samples = self._count_lists()
        if num_samples is None:
            raise ValueError(
                f"the batch ({self._name}) holds no tensor with a dimension to cut into "
                f"microbatches, nor a list with an entry for each sample; let collate_fn return "
                f"tensors, in a dict, list, tuple or dataclass say, {_INSTEAD}"
            )
        return num_samples

    def _count_lists(self) -> int | None:
        """Return the samples of a batch whose tensors are all in lists; None: none has any."""
        others = {p: v for p, v in self._unclear.items() if _has_containers(v)}
        columns = [v for p, v in self._unclear.items() if p not in others]
        if not others:
            lengths = {len(v) for v in columns if not _are_numbers(v)}
            return lengths.pop() if len(lengths) == 1 else None
        are_uniform = all(map(_is_uniform, others.values()))
        entries = {len(value) for value in others.values()} if are_uniform else set()
        by_list = [*map(_column_lengths, others.values())]
        if self.collation.by_torch and all(len(lengths) == 1 for lengths in by_list):
            columns_of = zip(others, by_list, strict=True)
            rows_of = {place: n for place, (n,) in columns_of if n != 1}
            if len({*rows_of.values()}) > 1:
                _refuse_unlike_lengths(rows_of)
        rows = set[int]().union(*by_list) if all(by_list) else set()
        rows = rows - {1} or rows
        lengths = {len(value) for value in columns}
        counts = [n for n in (entries, rows) if len(n) == 1]
        if len(counts) == 2 and entries != rows:
            likely = {self.collation.choose_num_samples(next(iter(entries)), next(iter(rows)))}
            counts = [n for n in counts if n == likely] or [n for n in counts if n <= lengths]
        self.is_by_entries = counts == [entries]
        if len(counts) == 1 or (counts and entries == rows):
            return next(iter(counts[0]))
        place, value = next(iter(others.items()))
        raise ValueError(
            f"{place} has {len(value)} entries with {' or '.join(map(str, sorted(rows)))} rows, "
            f"and there is no telling whether the batch has as many samples as entries or as rows; "
            f"{_stacking_advice(value)}"
        )


class _Split:
    """Splits one batch; decides on lists that no batch had before."""

    def __init__(
        self, lists: dict[str, bool], size: int, total: int, counter: _SampleCounter
    ) -> None:
        self._lists, self._total, self._counter = lists, total, counter
        self._slices = [slice(start, start + size) for start in range(0, total, size)]
        self.are_alike = True

    def parts(self, tree: Any, place: str) -> list[Any]:
        if isinstance(tree, Tensor | np.ndarray):
            return self._cut(tree) if self._has_rows(tree, place) else self._repeated(tree)
        if is_list(tree) and self._has_entries(tree, place):
            self.are_alike &= not _has_containers(tree)
            return self._cut(tree)
        parts = None if is_column(tree) else container_entries(tree)
        if parts is None:
            _refuse_object(tree, place)
            return self._repeated(tree)
        cuts = [*map(self.parts, parts, places_in(tree, place))]
        # An empty container, too, is another one in each part: steps may write into it.
        entries = zip(*cuts, strict=True) if cuts else [()] * len(self._slices)
        return [rebuild(tree, [*each]) for each in entries]

    def _cut(self, value: Any) -> list[Any]:
        return [value[part] for part in self._slices]

    def _repeated(self, value: Any) -> list[Any]:
        return [value] * len(self._slices)

    def _has_rows(self, value: Any, place: str) -> bool:
        if not value.ndim or len(value) == 1:
            return False
        if len(value) != self._total:
            raise ValueError(
                f"{place} has {len(value)} rows, and the batch has {self._total} samples; let it "
                f"have one row for each, or one for all, {_INSTEAD}"
            )
        return True

    def _has_entries(self, value: Any, place: str) -> bool:
        if not len(value):
            return False
        if place not in self._lists:
            self._lists[place] = self._decide(value, place)
        return self._lists[place]

    def _decide(self, value: Any, place: str) -> bool:
        if place == "batch" and not is_column(value):
            return False  # it would be in the table
        if len(value) != self._total:
            return False
        if not _has_containers(value):
            return self._decide_on_column(value, place)
        if not _is_uniform(value):
            return False
        if not self._counter.is_by_entries and _column_lengths(value) == {self._total}:
            if self._counter.collation.by_torch or _have_unlike_dtypes(value):
                return False
            raise ValueError(
                f"{place} has {len(value)} entries of as many rows, as the batch has samples: "
                f"there is no telling whether it has an entry for each sample or columns; "
                f"{_stacking_advice(value)}"
            )
        return True

    def _decide_on_column(self, value: Any, place: str) -> bool:
        if not _are_numbers(value) or self._counter.is_by_lists:
            return True
        if isinstance(value, list):
            raise ValueError(
                f"{place} is a list of {len(value)} numbers, and the batch has as many samples: "
                f"there is no telling whether it has one for each; let collate_fn make it a tensor "
                f"if so, and a tuple if not"
            )
        return False


def has_entry_for_each(value: Any, num_samples: int) -> bool:
    """Whether a list that a step returns has an entry for each sample, and not columns."""
    is_as_long = is_list(value) and len(value) == num_samples
    return is_as_long and _is_uniform(value) and _column_lengths(value) != {num_samples}


def refuse_unclear_list(batch: Any, loader_size: int | None) -> None:
    """Refuse a list that a ``collate_fn`` returns if it may be of samples or of columns.

    ``loader_size`` is the loader's batch size, if it has one.
    """
    if not isinstance(batch, list) or len(batch) < 2 or not _is_uniform(batch):
        return
    shapes = {(e.shape, e.dtype) if isinstance(e, Tensor) else None for e in batch}
    if len(shapes) > 1:
        return
    try:
        rows = _SampleCounter({"batch": False}, batch, Collation()).count()
    except ValueError:
        return
    if loader_size is not None and Collation(sizes={loader_size}).choose_num_samples(
        len(batch), rows
    ):
        return
    raise ValueError(
        f"collate_fn returns a list of {len(batch)} entries of like shapes, which may be samples "
        f"or columns; let it return a tuple of columns or a dict, {_INSTEAD}"
    )


def _stacking_advice(value: Any) -> str:
    if isinstance(value[0], Tensor):
        return f"let collate_fn stack it, or make it a dict of columns, {_INSTEAD}"
    return f"let collate_fn make it a dict of columns, {_INSTEAD}"


def _has_containers(value: Any) -> bool:
    """Whether a list has tensors, arrays or containers among its entries."""
    return any(
        isinstance(entry, Tensor | np.ndarray) or container_entries(entry) is not None
        for entry in value
    )


def _have_unlike_dtypes(value: Any) -> bool:
    """Whether the entries of a list are tensors or arrays of several dtypes, as columns are."""
    dtypes = {getattr(entry, "dtype", None) for entry in value}
    return None not in dtypes and len(dtypes) > 1


def _are_numbers(value: Any) -> bool:
    return all(isinstance(entry, Complex | np.bool_) for entry in value)


def _is_uniform(value: Any) -> bool:
    """Whether the entries of a list are of one kind, as those for samples are; None is of any."""
    return len({_kind_of(entry) for entry in value if entry is not None}) == 1


def _kind_of(entry: Any) -> Any:
    if isinstance(entry, Tensor | np.ndarray):
        return "tensor", entry.ndim
    if isinstance(entry, Complex | np.bool_):
        return "number"
    if is_list(entry):
        return "list"
    return "mapping" if isinstance(entry, Mapping) else type(entry)


def _column_lengths(value: Any) -> set[int]:
    """Return the numbers of rows of the columns that a list's entries may be.

    Entries with single values are of samples: then there are none.
    """
    rows: set[int] = set()
    has_values = False

    def collect_rows(tree: Any) -> None:
        nonlocal has_values
        if isinstance(tree, Tensor | np.ndarray):
            rows.update(tree.shape[:1])
            has_values |= not tree.ndim
        elif is_column(tree):
            rows.add(len(tree))
        elif (parts := container_entries(tree)) is not None:
            for part in parts:
                collect_rows(part)
        else:
            has_values |= isinstance(tree, Complex | np.bool_ | str | bytes)

    for entry in value:
        collect_rows(entry)
    if has_values:
        return set()
    return rows - {1} or rows


def _refuse_unlike_lengths(rows: Mapping[str, int]) -> None:
    lengths = sorted({*rows.values()})
    (place, length), *others = rows.items()
    other, unlike = next((name, n) for name, n in others if n != length)
    raise ValueError(
        f"the parts of the batch have different lengths {lengths} along dimension 0, which is cut "
        f"into microbatches: {place} has {length} rows or entries, {other} {unlike}; let each have "
        f"one for every sample, or one row for all, {_INSTEAD}"
    )


def _refuse_layout(tensor: Any, place: str) -> None:
    if type(tensor) is PackedSequence:
        raise ValueError(
            f"the batch holds a PackedSequence, {place}, which cannot be cut into microbatches; "
            f"let collate_fn return padded tensors and lengths, and pack them in the step, "
            f"{_INSTEAD}"
        )
    if isinstance(tensor, Tensor) and (tensor.layout is not torch.strided or tensor.is_nested):
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise ValueError(
            f"the batch holds a {kind} tensor, {place}, which cannot be cut into microbatches; let "
            f"collate_fn return a dense one (to_dense(), or padded: torch.nested.to_padded_tensor) "
            f"and make it {kind} in the step, {_INSTEAD}"
        )


def _refuse_object(value: Any, place: str) -> None:
    if not field_names(value) and tensors_of_object(value):
        raise ValueError(
            f"{place} is a {type(value).__name__}, whose tensors cannot be cut into microbatches; "
            f"let collate_fn return a dict, tuple or dataclass, {_INSTEAD}"
        )

"""The arguments of one call in a step, joined over a batch's microbatches.

=====================  ============================================================================
tensors, arrays        joined along their first dimension, that of samples
lists                  joined: of texts, or of a dict with boxes for each image
tuples and dicts       joined entry by entry
floats, 0-dim. ones    the mean by the microbatches' shares of the loss
0-dim. whole numbers   the sum: they count
one object             itself, where all microbatches were given the same tensor or string
=====================  ============================================================================

Where a Python integer may be a count or a constant, nothing is joined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipeoffload.runtime.batch import weighted_or_zero


class NotJoinedError(Exception):
    """It is unclear what the arguments of the microbatches are for the batch."""


class ArgumentJoiner:
    """Joins values of the microbatches in which a step made a call.

    Args:
        sizes: The samples of each of these microbatches.
        shares: The share of each in means over the batch.
        is_same: Whether two tensors are copies of the same object.
        counts: Whether Python integers are counts, which are summed, as for ``SumMetric``.
    """

    def __init__(
        self,
        sizes: Sequence[float],
        shares: Sequence[Any],
        is_same: Callable[[Tensor, Tensor], bool],
        counts: bool,
    ) -> None:
        self._sizes, self._shares, self._is_same = sizes, shares, is_same
        self._counts = counts
        self._joined: dict[tuple[int, ...], Tensor] = {}

    def join(self, values: Sequence[Any]) -> Any:
        """Return the batch's value; raises ``NotJoinedError``."""
        first = values[0]
        if len(values) == 1 or all(value is first for value in values[1:]):
            return first if not _is_count(first) or len(values) == 1 else self._join_numbers(values)
        if len({*map(type, values)}) > 1:
            raise NotJoinedError
        if isinstance(first, Tensor):
            return self._join_tensors(values)
        if isinstance(first, np.ndarray) and first.ndim:
            return np.concatenate(values)
        if isinstance(first, bool | str) or first is None:
            return self._join_plain_values(values)
        if isinstance(first, Real):
            return self._join_numbers(values)
        if isinstance(first, list):
            return [entry for value in values for entry in value]
        return self._join_structures(values)

    def _join_structures(self, values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, Mapping) and all(value.keys() == first.keys() for value in values):
            return {key: self.join([value[key] for value in values]) for key in first}
        if type(first) is tuple and len({*map(len, values)}) == 1:
            return tuple(self.join(entries) for entries in zip(*values, strict=True))
        raise NotJoinedError

    def _join_plain_values(self, values: Sequence[Any]) -> Any:
        if all(value == values[0] for value in values):
            return values[0]
        if isinstance(values[0], str):
            return [*values]
        raise NotJoinedError

    def _join_numbers(self, values: Sequence[Any]) -> Any:
        if isinstance(values[0], int):
            if self._counts:
                return sum(values)
            by_size = {value / size for value, size in zip(values, self._sizes, strict=True)}
            if len({*values}) > 1 or (values[0] and len(by_size) == 1 and _is_whole(by_size)):
                raise NotJoinedError
            return values[0]
        if all(value == values[0] for value in values):
            return values[0]
        return sum(map(weighted_or_zero, values, self._shares)) / sum(self._shares)

    def _join_tensors(self, values: Sequence[Tensor]) -> Tensor:
        first, others = values[0], values[1:]
        if all(self._is_same(first, value) for value in others):
            return first
        if not first.ndim:
            return self._join_scalars(values)
        if any(value.shape[1:] != first.shape[1:] or value.ndim != first.ndim for value in others):
            raise NotJoinedError
        key = tuple(map(id, values))
        if key not in self._joined:
            self._joined[key] = torch.cat([*values])
        return self._joined[key]

    def _join_scalars(self, values: Sequence[Tensor]) -> Tensor:
        dtype = values[0].dtype
        if dtype == torch.bool:
            raise NotJoinedError
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.stack([*values]).sum()
        precise = torch.promote_types(dtype, torch.float32)
        parts = [value.to(precise) for value in values]
        mean: Tensor = sum(map(weighted_or_zero, parts, self._shares)) / sum(self._shares)
        return mean.to(precise)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_whole(numbers: set[float]) -> bool:
    return all(float(number).is_integer() for number in numbers)

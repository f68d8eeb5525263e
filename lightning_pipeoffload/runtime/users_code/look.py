"""A look at values, which by another look tells whether they were changed in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CONSTANTS = (int, float, complex, str, torch.Size)

Look = list[tuple[Any, Any]]
"""Objects, which stay as long as the look, and what changes when each is written."""


class Parts(tuple[Any, ...]):
    """What a container holds; the same if the objects are."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parts) and [*map(id, self)] == [*map(id, other)]

    __hash__ = None  # type: ignore[assignment]


def is_same_look(before: Look, after: Look) -> bool:
    """Whether nothing was changed in between."""
    return len(before) == len(after) and all(
        _is_same(old, new) and was == now
        for (old, was), (new, now) in zip(before, after, strict=True)
    )


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, _CONSTANTS) and old == new)


def version_of(tensor: Tensor) -> int:
    """Return what each write to a tensor changes; -1 in inference mode, where nothing tells."""
    return -1 if tensor.is_inference() else tensor._version  # private: counts the writes

"""A look at values, which by another look tells whether they were changed in between."""

from __future__ import annotations

from typing import Any

from torch import Tensor

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
        old is new and was == now for (old, was), (new, now) in zip(before, after, strict=True)
    )


def version_of(tensor: Tensor) -> int:
    """Return what each write to a tensor changes; -1 in inference mode, where nothing tells."""
    return -1 if tensor.is_inference() else tensor._version  # private: counts the writes

"""The leaves of a pytree, found without torch's four questions to each node of a plain one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_iter  # private: see shape_only


def leaves_of(tree: Any) -> Iterator[Any]:
    """Yield what ``tree_iter`` yields, in its order; every block's arguments come through here."""
    left = [tree]
    while left:
        part = left.pop()
        kind = type(part)
        if isinstance(part, Tensor):
            yield part
        elif kind is tuple or kind is list:
            left.extend(reversed(part))
        elif kind is dict:
            left.extend(reversed(part.values()))
        else:
            yield from tree_iter(part)


def tensors_in(tree: Any) -> list[Tensor]:
    """List the tensors of a pytree."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]

"""Values in a tree of dicts, lists and tuples, by their place: the keys that lead to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly

Place = tuple[Any, ...]


def leaves_with_places(tree: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield what is in a tree of dicts, lists and tuples, and where."""
    for key, value in _entries(tree):
        if isinstance(value, (Mapping, list, tuple)):
            yield from leaves_with_places(value, (*place, key))
        else:
            yield (*place, key), value


def _entries(tree: Any) -> Iterable[tuple[Any, Any]]:
    return tree.items() if isinstance(tree, Mapping) else enumerate(tree)


def with_values(tree: Any, values: Mapping[Place, Any], place: Place = ()) -> Any:
    """Return a tree with other values in some places; what has none of them is the same object."""
    if place in values:
        return values[place]
    if not isinstance(tree, (Mapping, list, tuple)):
        return tree
    entries = [(key, old, with_values(old, values, (*place, key))) for key, old in _entries(tree)]
    changed = {key: new for key, old, new in entries if new is not old}
    if not changed:
        return tree
    if isinstance(tree, tuple):
        members = [new for _, _, new in entries]
        return type(tree)(*members) if hasattr(tree, "_fields") else tuple(members)
    made: Any = copy(tree)
    for key, new in changed.items():
        made[key] = new
    return made


def map_tensors(function: Callable[[Place, Tensor], Any], tree: Any) -> Any:
    """Return a tree with what a function of place and tensor makes of its tensors."""
    leaves = ((place, leaf) for place, leaf in leaves_with_places(tree) if isinstance(leaf, Tensor))
    return with_values(tree, {place: function(place, leaf) for place, leaf in leaves})


def shapes_of(tree: Any, global_rank: int) -> Any:
    """Return a state, nested as it may be, without its values, which are on ``global_rank``."""
    host = torch.device("cpu")

    def shape(place: Place, tensor: Tensor) -> Tensor:
        name = ".".join(map(str, place))
        origin = frozenset((f"{name} (on global rank {global_rank})",))
        meta = tensor.meta if isinstance(tensor, ShapeOnly) else tensor.to("meta")
        return ShapeOnly(meta, host, origin)

    return map_tensors(shape, tree)

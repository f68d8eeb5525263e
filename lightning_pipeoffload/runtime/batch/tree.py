"""Batches as trees: dicts, lists, tuples, dataclasses and attrs objects, with their entries."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

_TEXT = (str, bytes)


def batch_leaves(tree: Any, keeps_columns: bool = False) -> list[Any]:
    """Flatten a batch: return its tensors and all other values.

    Args:
        tree: The batch.
        keeps_columns: Whether a list of plain values stays whole, as :func:`is_column` tells; else
            each of its entries is a leaf.
    """
    leaves: list[Any] = []
    left = [tree]
    while left:
        part = left.pop()
        is_leaf = isinstance(part, Tensor) or (keeps_columns and is_column(part))
        parts = None if is_leaf else container_entries(part)
        if parts is None:
            leaves.append(part)
        else:
            left += reversed(parts)
    return leaves


def map_batch(leaf: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree like ``tree``, with the result of ``leaf`` in place of each leaf.

    Leaves are tensors, single values, and lists of plain values as a whole; see :func:`is_column`.
    """
    if isinstance(tree, Tensor) or is_column(tree):
        return leaf(tree)
    parts = container_entries(tree)
    if parts is None:
        return leaf(tree)
    return rebuild(tree, [map_batch(leaf, part) for part in parts])


def is_list(value: Any) -> bool:
    """Whether ``value`` is a list, or a tuple that is no namedtuple."""
    return isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields"))


def is_column(value: Any) -> bool:
    """Whether ``value`` is a list without tensors or containers, or a tuple of strings (bytes)."""
    if type(value) is tuple:
        has_text = bool(value) and isinstance(value[0], _TEXT)
        return has_text and all(isinstance(entry, _TEXT) for entry in value)
    return isinstance(value, list) and not any(
        isinstance(entry, Tensor) or container_entries(entry) is not None for entry in value
    )


def container_entries(tree: Any) -> list[Any] | None:
    """Return the entries of a container; None if it is none."""
    if isinstance(tree, Mapping):
        return list(tree.values())
    if isinstance(tree, (list, tuple)):
        return list(tree)
    names = field_names(tree)
    return [getattr(tree, name) for name in names] if names else None


def places_in(tree: Any, place: str) -> list[str]:
    """Return the places of a container's entries in the batch, such as ``batch['x']``."""
    keys: Iterable[Any] = tree if isinstance(tree, Mapping) else field_names(tree)
    if isinstance(tree, (list, tuple)):
        keys = range(len(tree))
    return [f"{place}[{key!r}]" for key in keys]


def field_names(tree: Any) -> list[str]:
    """Return the fields of an object of a dataclass or attrs class; empty for any other."""
    if isinstance(tree, type):
        return []
    if dataclasses.is_dataclass(tree):
        return [field.name for field in dataclasses.fields(tree)]
    return [field.name for field in getattr(type(tree), "__attrs_attrs__", ())]


def rebuild(tree: Any, parts: list[Any]) -> Any:
    """Make a container like ``tree`` with other entries, whatever its constructor takes."""
    if isinstance(tree, tuple):
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, Mapping) and not isinstance(tree, MutableMapping):
        return type(tree)(dict(zip(tree, parts, strict=True)))  # type: ignore[call-arg]
    rebuilt = copy.copy(tree)
    if isinstance(tree, list):
        rebuilt[:] = parts
    elif isinstance(tree, MutableMapping):
        for key, part in zip(tree, parts, strict=True):
            rebuilt[key] = part
    else:
        for name, part in zip(field_names(tree), parts, strict=True):
            object.__setattr__(rebuilt, name, part)  # it may be frozen
    return rebuilt


def tensors_of_object(value: Any, depth: int = 3) -> list[Tensor]:
    """List the tensors in the attributes of an object that is no container."""
    space = getattr(value, "__dict__", None)
    if not isinstance(space, dict) or isinstance(value, Tensor | type) or not depth:
        return []
    tensors: list[Tensor] = []
    for part in batch_leaves(space):
        tensors += [part] if isinstance(part, Tensor) else tensors_of_object(part, depth - 1)
    return tensors

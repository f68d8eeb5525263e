"""Faster iteration over the leaves of a pytree: torch makes four checks at each node."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import (  # private: torch's own containers, HF outputs too
    register_pytree_node,
    tree_iter,
    tree_map,
)

_PLAIN = {type(None), bool, int, float, str}
_WITH_KEYS = {dict, OrderedDict, defaultdict}
_MUTABLE = {list, deque, *_WITH_KEYS}  # the containers that torch's pytree opens and users change


def leaves_of(tree: Any) -> list[Any]:
    """List the leaves of ``tree_iter``, in the same order; called for each block's arguments."""
    leaves, left = [], [tree]
    while left:
        part = left.pop()
        kind = type(part)
        if isinstance(part, Tensor) or kind in _PLAIN:
            leaves.append(part)
        elif kind is tuple or kind is list:
            left.extend(reversed(part))
        elif kind is dict:
            left.extend(reversed(part.values()))
        else:
            leaves.extend(tree_iter(part))
    return leaves


def map_operands(function: Callable[[Any], Any], operands: Any) -> Any:
    """Do ``tree_map`` for tuples, lists and dicts: the dispatcher passes no other containers."""
    kind = type(operands)
    if kind is tuple or kind is list:
        return kind([map_operands(function, part) for part in operands])
    if kind is dict:
        return {name: map_operands(function, part) for name, part in operands.items()}
    return function(operands)


def map_in_place(function: Callable[[Any], Any], tree: Any) -> Any:
    """Do ``tree_map``, but lists, dicts and deques stay the same objects, as their users see."""
    if type(tree) not in _MUTABLE:
        return tree_map(
            lambda part: (map_in_place if type(part) in _MUTABLE else _apply)(function, part),
            tree,
            is_leaf=lambda part: type(part) in _MUTABLE,
        )
    for key in [*tree] if type(tree) in _WITH_KEYS else range(len(tree)):
        tree[key] = map_in_place(function, tree[key])
    return tree


def _apply(function: Callable[[Any], Any], leaf: Any) -> Any:
    return function(leaf)


def tensors_in(tree: Any) -> list[Tensor]:
    """List the tensors of a pytree."""
    if type(tree) is Tensor:  # as most blocks return
        return [tree]
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


# Dataclasses, which torch takes for leaves. Only those that blocks return are opened: an argument
# that a block writes into has to stay the same object.


class DataclassNode:
    """A dataclass as a node of a pytree."""

    def __init__(self, template: Any, values: list[Any]) -> None:
        self.template = template  # a copy of the object, without the values
        self.values = values


register_pytree_node(
    DataclassNode,
    lambda node: (node.values, node.template),
    lambda values, template: DataclassNode(template, list(values)),
)


def has_dataclasses(tree: Any) -> bool:
    """Return whether a block's output contains dataclasses that torch does not open."""
    return type(tree) is not Tensor and any(map(_is_dataclass_instance, leaves_of(tree)))


def dataclasses_to_nodes(tree: Any) -> Any:
    """Return a pytree with a :class:`DataclassNode` in place of each dataclass."""
    return tree_map(_open, tree)


def nodes_to_dataclasses(tree: Any) -> Any:
    """Undo :func:`dataclasses_to_nodes`, with new objects."""
    return tree_map(_close, tree, is_leaf=lambda part: isinstance(part, DataclassNode))


def _is_dataclass_instance(leaf: Any) -> bool:
    return is_dataclass(leaf) and not isinstance(leaf, type)


def _open(leaf: Any) -> Any:
    if not _is_dataclass_instance(leaf):
        return leaf
    names, template = [field.name for field in fields(leaf)], copy(leaf)
    for name in names:
        object.__setattr__(template, name, None)  # also of what is frozen
    return DataclassNode(template, [dataclasses_to_nodes(getattr(leaf, name)) for name in names])


def _close(leaf: Any) -> Any:
    if not isinstance(leaf, DataclassNode):
        return leaf
    closed = copy(leaf.template)
    for field, value in zip(fields(closed), leaf.values, strict=True):
        object.__setattr__(closed, field.name, nodes_to_dataclasses(value))
    return closed


def output_leaves(output: Any) -> Iterator[Any]:
    """Yield the leaves of a block's return value, also those in dataclasses."""
    for leaf in leaves_of(output):
        if _is_dataclass_instance(leaf):
            yield from output_leaves([getattr(leaf, field.name) for field in fields(leaf)])
        else:
            yield leaf


def map_output(function: Callable[[Any], Any], output: Any) -> Any:
    """Map the leaves of a block's return value, also those in dataclasses."""
    if type(output) is Tensor or not has_dataclasses(output):
        return tree_map(function, output)
    return nodes_to_dataclasses(tree_map(function, dataclasses_to_nodes(output)))


def output_tensors(output: Any) -> list[Tensor]:
    """List the tensors of a block's return value."""
    if type(output) is Tensor:  # as most blocks do
        return [output]
    return [leaf for leaf in output_leaves(output) if isinstance(leaf, Tensor)]

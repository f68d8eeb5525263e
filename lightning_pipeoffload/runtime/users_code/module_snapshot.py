"""Runs something on a module, leaves the module as it was, and tells what was changed in place."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.users_code.libraries import is_opaque
from lightning_pipeoffload.runtime.users_code.look import Look, Parts
from lightning_pipeoffload.runtime.users_code.sources import is_generator

_DEPTH = 3
_LARGEST = 1 << 24  # bytes of an array; a larger one is data
_NOT_COLLECTIONS = (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType)
_CONTAINERS = (list, dict, set, deque)
_VALUES = (dict.values, OrderedDict.values)


Attribute = tuple[nn.Module, str]
"""A module of the tree, and the name of one of its attributes."""


@dataclass(eq=False)
class _Place:
    """What can be changed in place, and what to give back to it."""

    owner: nn.Module
    attribute: str | None  # in whose value it is; None: it is the owner's attributes themselves
    container: Any
    contents: Any
    copies: dict[str, Any] = field(default_factory=dict)

    def copy_tensors(self) -> None:
        if isinstance(self.container, dict):
            copies = ((name, _copy(value)) for name, value in self.contents.items())
            self.copies = {name: copied for name, copied in copies if copied is not None}
            self.container.update(self.copies)

    def written(self) -> Iterator[Attribute]:
        """Yield the attributes whose values were changed in place, not just replaced."""
        pairs = ((name, copied, self.contents[name]) for name, copied in self.copies.items())
        names = [name for name, copied, value in pairs if is_written(copied, value)]
        if self.attribute is None:
            yield from ((self.owner, name) for name in names)
        elif names or not self._has_same_parts():
            yield self.owner, self.attribute

    def _has_same_parts(self) -> bool:
        before, now = parts_of(self.contents), parts_of(self.container)
        copies = {id(copied) for copied in self.copies.values()}
        return len(before) == len(now) and all(
            new is old or id(new) in copies for old, new in zip(before, now, strict=True)
        )


def _copy(value: Any) -> Any:
    """Copy a tensor or an array; None: it is none, or so large that it is data."""
    if type(value) is Tensor:
        return value.clone()
    is_small = isinstance(value, np.ndarray) and value.nbytes <= _LARGEST
    return value.copy() if is_small else None


def is_written(copied: Any, value: Any) -> bool:
    """Whether a copy of ``value`` was changed in place since it was made."""
    if isinstance(value, np.ndarray):
        return bool(copied.tobytes() != value.tobytes())
    # Private: the version counts the writes, but not those through .data, nor those to what an
    # inference mode has made.
    is_counted = not copied.is_inference() and bool(copied._version)
    return is_counted or not _has_same_values(copied, value)


@torch.no_grad()
def _has_same_values(copied: Tensor, value: Tensor) -> bool:
    if copied.layout is not torch.strided or copied.is_meta or copied.is_quantized:
        return True
    if copied.shape != value.shape or copied.dtype != value.dtype:
        return False
    there = value.to(copied.device)
    is_same = (copied == there) | ((copied != copied) & (there != there))  # NaN is itself
    return bool(is_same.all())


@contextmanager
def unchanged(module: nn.Module) -> Iterator[set[Attribute]]:
    """Give every attribute and container of the module tree its contents back afterwards.

    Containers in containers and plain objects are looked into, three deep.

    Yields:
        The attributes whose values were changed in place; filled at the end.
    """
    places = list(_places(module))
    for place in places:
        place.copy_tensors()
    written: set[Attribute] = set()
    try:
        yield written
    finally:
        for place in places:
            written.update(place.written())
            refill(place.container, place.contents)


def _places(module: nn.Module) -> Iterator[_Place]:
    spaces = [(child, child.__dict__) for child in module.modules()]
    known = {id(space) for _, space in spaces}
    for child, space in spaces:
        yield _Place(child, None, space, space.copy())
        for name, value in list(space.items()):
            for container in _containers(value, known, _DEPTH):
                yield _Place(child, name, container, container.copy())


def parts_of(container: Any) -> Parts:
    """List the values in a container."""
    return Parts(container.values() if isinstance(container, dict) else container)


def private_copy(value: Any, depth: int = _DEPTH) -> Any:
    """Copy what can be changed in place in a value, as deep as :func:`unchanged` looks."""
    if type(value) is Tensor:
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if depth == 0 or not (_is_container(value) or _attributes(value)):
        return value
    found = copy.copy(value)
    if isinstance(found, (list, deque)):
        refill(found, [private_copy(part, depth - 1) for part in value])
    elif not isinstance(found, set):
        inside = found if isinstance(found, dict) else found.__dict__
        inside.update({name: private_copy(part, depth - 1) for name, part in inside.items()})
    return found


def containers_in(value: Any) -> list[Any]:
    """List what can be changed in place in a value, as deep as :func:`unchanged` looks."""
    return list(_containers(value, set(), _DEPTH))


def look_into(value: Any) -> Look:
    """Look at what can be changed in place in a value."""
    return [(container, parts_of(container)) for container in containers_in(value)]


def _containers(value: Any, known: set[int], depth: int) -> Iterator[Any]:
    """Yield what can be changed in place: a container, an object's attributes, and those in it."""
    place = value if _is_container(value) else _attributes(value)
    if place is None or id(place) in known:
        return
    known.add(id(place))
    yield place
    if depth > 1:
        for part in parts_of(place):
            yield from _containers(part, known, depth - 1)


def _is_container(value: Any) -> bool:
    """Whether a value holds others; a dict that computes its own may load much, or fail."""
    if isinstance(value, dict):
        return type(value).values in _VALUES
    return isinstance(value, _CONTAINERS)


def _attributes(value: Any) -> dict[str, Any] | None:
    if isinstance(value, _NOT_COLLECTIONS) or is_opaque(value):
        return None
    if is_generator(value):
        return None
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else None  # a generic alias has its class's


def refill(container: Any, contents: Any) -> None:
    """Give a container the contents that its copy has."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(contents)
    else:
        container.update(contents)

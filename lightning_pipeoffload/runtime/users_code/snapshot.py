"""What values hold: looked at, copied, kept, and put back.

Lists, dicts, sets, deques and tuples in each other, as torch's pytree sees them, and the attributes
of objects of users' own classes, three deep.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks,  # private: hooks of all modules' forwards
    _global_forward_pre_hooks,
)

from lightning_pipeoffload.runtime.randomness import forked_randomness
from lightning_pipeoffload.runtime.users_code.sources import Generators, is_generator
from lightning_pipeoffload.runtime.users_code.users_lines import is_opaque

_DEPTH = 3
_LARGEST = 1 << 24  # bytes of an array; a larger one is data
_NOT_COLLECTIONS = (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType)
_CONTAINERS = (list, set, deque)
_VALUES = (dict.values, OrderedDict.values)
_WRITTEN = (Tensor, np.ndarray)
_PLAIN = {int, float, bool, str, type(None), FunctionType, MethodType}
_CONSTANTS = (int, float, complex, str, torch.Size)

Attribute = tuple[nn.Module, str]
"""A module of the tree, and the name of one of its attributes."""

Look = list[tuple[Any, Any]]
"""Objects, which stay as long as the look, and what changes when each is written."""


class Parts(tuple[Any, ...]):
    """What a container holds; the same if the objects are."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parts) and [*map(id, self)] == [*map(id, other)]

    __hash__ = None  # type: ignore[assignment]


def look_at(value: Any, depth: int = _DEPTH, longest: int = sys.maxsize) -> Look:
    """Look at a value, at containers in it, and at their tensors and arrays.

    Args:
        value: The value.
        depth: How deep to look.
        longest: Of a container with more parts the number tells enough.
    """
    if is_plain(value):
        return [(value, 0)]
    found: Look = [(value, _state_of(value))]
    for container, parts in _walk(value, set(), depth, longest):
        if len(parts) > longest:
            found.append((container, len(parts)))
            continue
        found.append((container, parts))
        found += [(part, _state_of(part)) for part in parts if isinstance(part, _WRITTEN)]
    return found


def is_plain(value: Any) -> bool:
    """Whether nothing in a value can change: a number, a string, a function."""
    return type(value) in _PLAIN


def is_same_look(before: Look, after: Look) -> bool:
    """Whether nothing was changed in between."""
    return len(before) == len(after) and all(
        _is_same(old, new) and was == now
        for (old, was), (new, now) in zip(before, after, strict=True)
    )


def _is_same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and isinstance(old, _CONSTANTS) and old == new)


def _state_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        # Private: counts the writes. In inference mode nothing tells.
        version = -1 if value.is_inference() else value._version
        return version, value.requires_grad
    is_small = isinstance(value, np.ndarray) and value.nbytes <= _LARGEST
    return zlib.crc32(value.tobytes()) if is_small else 0


# Containers and what is in them


def parts_of(container: Any) -> Parts:
    """List the values in a container."""
    if isinstance(container, dict):
        return Parts(container.values())
    return Parts(_fields(container).values() if _has_fields_only(container) else container)


def containers_in(value: Any, known: set[int] | None = None) -> Iterator[Any]:
    """Yield what can be changed in place in a value: containers, and the attributes of objects.

    Args:
        value: The value.
        known: The ids of those that are left out, to which the others come.
    """
    for place, _ in _walk(value, set() if known is None else known, _DEPTH):
        if isinstance(place, (dict, *_CONTAINERS)):
            yield place


def _walk(
    value: Any, known: set[int], depth: int, longest: int = sys.maxsize
) -> Iterator[tuple[Any, Parts]]:
    place = value if _is_container(value) else _space_of(value)
    if place is None or id(place) in known:
        return
    known.add(id(place))
    parts = parts_of(place)
    yield place, parts
    if depth > 1 and len(parts) <= longest:
        for part in parts:
            yield from _walk(part, known, depth - 1, longest)


def _is_container(value: Any) -> bool:
    """Whether it holds others; not a dict that computes its own, which may load much, or fail."""
    if isinstance(value, dict):  # those of transformers' outputs, dataclasses too, refuse updates
        return type(value).values in _VALUES and not dataclasses.is_dataclass(value)
    return isinstance(value, (*_CONTAINERS, tuple)) and not isinstance(value, torch.Size)


def _space_of(value: Any) -> Any:
    """Return the attributes of an object of a user's class; a dataclass with slots is itself."""
    if isinstance(value, _NOT_COLLECTIONS) or is_opaque(value) or is_generator(value):
        return None
    found = getattr(value, "__dict__", None)
    if isinstance(found, dict):  # a generic alias has its class's
        return found
    return value if _has_fields_only(value) else None


def _has_fields_only(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not hasattr(value, "__dict__")


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def refill(container: Any, contents: Any) -> None:
    """Give a container the contents that its copy has."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(contents)
    else:
        container.update(contents)


def private_copy(value: Any, known: dict[int, Any] | None = None, depth: int = _DEPTH) -> Any:
    """Copy the tensors, arrays and containers of a value; what is there twice stays one object.

    Args:
        value: The value.
        known: Copies by the identity of what was copied; those that are there are taken as they
            are.
        depth: How deep to look.
    """
    known = {} if known is None else known
    if id(value) not in known:
        known[id(value)] = _copy(value, known, depth)
    return known[id(value)]


def _copy(value: Any, known: dict[int, Any], depth: int) -> Any:
    if isinstance(value, Tensor):
        trains = value.requires_grad and value.is_leaf
        is_weight = isinstance(value, nn.Parameter)
        return value if is_weight else value.detach().clone().requires_grad_(trains)
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= _LARGEST else value
    if depth == 0 or callable(value):
        return value
    inside = partial(private_copy, known=known, depth=depth - 1)
    return _copy_container(value, inside) if _is_container(value) else _copy_object(value, inside)


def _copy_container(value: Any, inside: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple):
        parts = [*map(inside, value)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    found = copy.copy(value)
    if isinstance(found, dict):
        for name, part in value.items():
            found[name] = inside(part)
    elif not isinstance(found, set):
        refill(found, map(inside, value))
    return found


def _copy_object(value: Any, inside: Callable[[Any], Any]) -> Any:
    space = _space_of(value)
    if space is None:
        return value
    found = copy.copy(value)
    for name, part in (space if isinstance(space, dict) else _fields(value)).items():
        object.__setattr__(found, name, inside(part))  # also of what is frozen
    return found


# Putting back


class _Place:
    """A container, of which the step has copies of tensors and arrays while it is looked at."""

    def __init__(self, owner: nn.Module, attribute: str | None, container: Any) -> None:
        self._owner = owner
        self._attribute = attribute  # in whose value it is; None: it is the owner's attributes
        self.container = container
        self._contents = container.copy()
        self._copies: dict[Any, Any] = {}
        if isinstance(container, (dict, list)):
            keys = container if isinstance(container, dict) else range(len(container))
            copies = ((key, _copy_written(self._contents[key])) for key in keys)
            self._copies = {key: copied for key, copied in copies if copied is not None}
            for key, copied in self._copies.items():
                container[key] = copied

    def put_back(self) -> None:
        refill(self.container, self._contents)

    def written(self) -> Iterator[Attribute]:
        """Yield the attributes whose values were changed in place, not just replaced."""
        pairs = ((key, copied, self._contents[key]) for key, copied in self._copies.items())
        names = [key for key, copied, value in pairs if is_written(copied, value)]
        if self._attribute is None:
            yield from ((self._owner, name) for name in names)
        elif names or not self._has_same_parts():
            yield self._owner, self._attribute

    def _has_same_parts(self) -> bool:
        before, now = parts_of(self._contents), parts_of(self.container)
        copies = {id(copied) for copied in self._copies.values()}
        return len(before) == len(now) and all(
            new is old or id(new) in copies for old, new in zip(before, now, strict=True)
        )


def _copy_written(value: Any) -> Any:
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

    Yields:
        The attributes whose values were changed in place; filled at the end.
    """
    places = list(_places(module))
    written: set[Attribute] = set()
    try:
        yield written
    finally:
        for place in places:
            written.update(place.written())
            place.put_back()


def _places(module: nn.Module) -> Iterator[_Place]:
    spaces = [(child, child.__dict__) for child in module.modules()]
    known = {id(space) for _, space in spaces}
    found: list[tuple[nn.Module, str | None, Any]] = []
    for child, space in spaces:
        found.append((child, None, space))
        for name, value in space.items():
            found += [(child, name, inside) for inside in containers_in(value, known)]
    return (_Place(*place) for place in found)


@contextmanager
def leaving_no_trace(module: nn.Module, written: Container[str]) -> Iterator[None]:
    """Give gradients, buffers, attributes, generators and some weights back as they were.

    Args:
        module: The user's module.
        written: Names of the parameters that steps write.
    """
    named = module.named_parameters()
    weights = [(p, p.detach().clone()) for name, p in named if name in written]
    gradients: list[tuple[Tensor, Tensor | None]] = [(p, p.grad) for p in module.parameters()]
    try:
        with forked_randomness(), Generators(module).kept(), unchanged(module):
            for parameter, _ in gradients:
                parameter.grad = None
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for parameter, value in weights:
            parameter.detach().copy_(value)


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a forward runs hooks of the user's, which may keep a trace."""
    return any(_forward_hooks(module))


@contextmanager
def without_forward_hooks(module: nn.Module) -> Iterator[None]:
    """Run forwards whose results are thrown away, of which no hook of the user's hears."""
    found = [(hooks, [*hooks.items()]) for hooks in _forward_hooks(module) if hooks]
    for hooks, _ in found:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, registered in found:
            hooks.update(registered)


def _forward_hooks(module: nn.Module) -> Iterator[dict[int, Any]]:
    # Private: no public name lists the hooks of a module, or those of all modules.
    yield from (_global_forward_hooks, _global_forward_pre_hooks)
    for part in module.modules():
        yield from (part._forward_hooks, part._forward_pre_hooks)


def hooked(module: nn.Module) -> str:
    """Return the name of what has a hook of the user's, which may keep a trace; empty: nothing."""
    # Private: no public name lists the hooks of a tensor or a module.
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return name
    for name, part in module.named_modules():
        kinds = (part._forward_hooks, part._forward_pre_hooks)
        if any((*kinds, part._backward_hooks, part._backward_pre_hooks)):
            return name or type(part).__name__
    return ""

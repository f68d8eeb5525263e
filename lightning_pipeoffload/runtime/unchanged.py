"""Runs something on a module and leaves the module as it was."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_DEPTH = 3
_NOT_COLLECTIONS = (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType)
_LIBRARIES = {"builtins", "torch", "lightning", "functools"}


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Give every attribute and container of the module tree its contents back afterwards.

    Containers in containers and plain objects are looked into, three deep.
    """
    places = [child.__dict__ for child in module.modules()]
    known = {id(place) for place in places}
    for place in list(places):
        for value in place.values():
            places += _containers(value, known, _DEPTH)
    saved = [(place, place.copy()) for place in places]
    for place, contents in saved:
        if isinstance(place, dict):
            for name, value in contents.items():
                if type(value) is Tensor:
                    place[name] = value.clone()
    try:
        yield
    finally:
        for place, contents in saved:
            _refill(place, contents)


def _containers(value: Any, known: set[int], depth: int) -> Iterator[Any]:
    """Yield what can be changed in place: a container, an object's attributes, and those in it."""
    place = value if isinstance(value, (list, dict, set, deque)) else _attributes(value)
    if place is None or id(place) in known:
        return
    known.add(id(place))
    yield place
    if depth > 1:
        for part in list(place.values() if isinstance(place, dict) else place):
            yield from _containers(part, known, depth - 1)


def _attributes(value: Any) -> dict[str, Any] | None:
    if isinstance(value, _NOT_COLLECTIONS) or type(value).__module__.split(".")[0] in _LIBRARIES:
        return None
    return getattr(value, "__dict__", None)


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(contents)
    else:
        container.update(contents)

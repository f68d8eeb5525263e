"""Where a module's own code keeps what it counts, collects and draws from.

It is in the attributes of its modules; in those of their classes, where ``losses = []`` ends up;
and in the Python modules that define these, with those that they import of the user's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from itertools import starmap
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from lightning_pipeoffload.runtime.users_code.libraries import is_users
from lightning_pipeoffload.runtime.users_code.look import Parts
from lightning_pipeoffload.runtime.users_code.source_kinds import SourceKind

GONE = object()  # the value of a name that is not there
REGISTRIES = frozenset(nn.Module().__dict__)  # what torch keeps among a module's attributes


class Namespace(NamedTuple):
    """Named values: the attributes or buffers of a module, a class, a Python module, an object.

    Attributes:
        owner: The module, class, Python module or object that has them.
        name: The name of the owner.
        is_buffers: Whether they are the module's buffers.
    """

    owner: Any
    name: str
    is_buffers: bool = False

    @classmethod
    def of_part(cls, path: str, part: nn.Module, is_buffers: bool = False) -> Namespace:
        """Return the namespace of a part of the user's module."""
        return cls(part, f"self.{path}" if path else "self", is_buffers)

    @property
    def key(self) -> tuple[int, bool]:
        """What tells it from others; the owner may be equal to another one."""
        return id(self.owner), self.is_buffers

    @property
    def is_shared(self) -> bool:
        """Whether the values are not those of one module alone."""
        return not isinstance(self.owner, nn.Module)

    @property
    def contents(self) -> Mapping[str, Any]:
        """All values by name."""
        found: Mapping[str, Any] = vars(self.owner)
        return found["_buffers"] if self.is_buffers else found

    def variables(self) -> dict[str, Any]:
        """Return what the user has put there, by name."""
        return {
            name: value
            for name, value in self.contents.items()
            if not (name.startswith("__") if self.is_shared else name in REGISTRIES)
        }

    def put(self, name: str, value: Any) -> None:
        """Give a name its value, or take it away where that is :data:`GONE`."""
        if isinstance(self.owner, type):
            if value is not GONE:
                setattr(self.owner, name, value)
            elif name in self.contents:
                delattr(self.owner, name)
        elif value is GONE:
            self.contents.pop(name, None)  # type: ignore[attr-defined] # a dict, as all but a class
        else:
            self.contents[name] = value  # type: ignore[index]


def namespaces(module: nn.Module) -> Iterator[Namespace]:
    """Yield the namespaces of the module tree, its classes and their Python modules."""
    yield from starmap(Namespace.of_part, module.named_modules())
    classes = {cls for child in module.modules() for cls in type(child).__mro__}
    own = {cls for cls in classes if is_users(cls.__module__)}
    places = reachable({cls.__module__ for cls in own})
    yield from (Namespace(cls, cls.__qualname__) for cls in own | classes_in(places))
    for python_module in places:
        yield Namespace(python_module, python_module.__name__)


def classes_in(places: Iterable[ModuleType]) -> set[type[Any]]:
    """List the user's classes that have a name there: autograd functions, settings."""
    values = [value for place in places for value in vars(place).values()]
    classes = {value for value in values if isinstance(value, type)}
    return {c for c in classes if not issubclass(c, Enum) and is_users(c.__module__)}


def reachable(names: set[str]) -> list[ModuleType]:
    """Return the user's of these Python modules, and those from which they have something."""
    found: dict[str, ModuleType] = {}
    left = sorted(names)
    while left:
        name = left.pop()
        if name in found or not is_users(name) or name not in sys.modules:
            continue
        found[name] = sys.modules[name]
        for value in vars(found[name]).values():
            is_module = isinstance(value, ModuleType)
            left.append(value.__name__ if is_module else getattr(value, "__module__", None) or "")
    return list(found.values())


def _read(namespace: Namespace) -> Parts:
    return Parts(part for item in namespace.variables().items() for part in item)


def _write(namespace: Namespace, state: Parts) -> None:
    # One by one: other threads may run code of a Python module meanwhile.
    before = dict(zip(state[::2], state[1::2], strict=True))
    now = namespace.variables()
    for name in now.keys() - before.keys():
        namespace.put(name, GONE)
    for name, value in before.items():
        if name not in now or now[name] is not value:
            namespace.put(name, value)


NAMES = SourceKind(_read, _write, draws=False)
"""Which values a shared namespace has by which names."""

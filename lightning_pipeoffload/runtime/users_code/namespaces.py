"""Where a module's own code keeps what it counts, collects and draws from.

In the attributes of its modules; in those of their classes, where ``losses = []`` ends up; and in
the Python modules that define these, with those that they import of the user's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

from lightning_pipeoffload.runtime.users_code.libraries import is_users
from lightning_pipeoffload.runtime.users_code.look import Parts
from lightning_pipeoffload.runtime.users_code.source_kinds import SourceKind

REGISTRIES = frozenset(nn.Module().__dict__)  # what torch keeps among a module's attributes


class Namespace(NamedTuple):
    """Named values of a module, a class or a Python module.

    Attributes:
        owner: whose they are.
        name: of the owner.
    """

    owner: Any
    name: str

    @property
    def is_shared(self) -> bool:
        """Whether they are not those of one object."""
        return isinstance(self.owner, (type, ModuleType))

    def variables(self) -> dict[str, Any]:
        """Return what the user has put there, by name."""
        ignored = frozenset() if self.is_shared else REGISTRIES
        return {
            name: value
            for name, value in vars(self.owner).items()
            if name not in ignored and not name.startswith("__")
        }

    def assign(self, name: str, value: Any) -> None:
        """Give one of them another value."""
        if self.is_shared:
            setattr(self.owner, name, value)
        else:
            vars(self.owner)[name] = value


def namespaces(module: nn.Module) -> Iterator[Namespace]:
    """Yield those of the module tree, its classes and their Python modules."""
    for path, child in module.named_modules():
        yield Namespace(child, f"self.{path}" if path else "self")
    classes = {cls for child in module.modules() for cls in type(child).__mro__}
    own = [cls for cls in classes if is_users(cls.__module__)]
    yield from (Namespace(cls, cls.__qualname__) for cls in own)
    for python_module in reachable({cls.__module__ for cls in own}):
        yield Namespace(python_module, python_module.__name__)


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
        delattr(namespace.owner, name)
    for name, value in before.items():
        if name not in now or now[name] is not value:
            setattr(namespace.owner, name, value)


NAMES = SourceKind(_read, _write, draws=False)
"""Which values a shared namespace has by which names."""

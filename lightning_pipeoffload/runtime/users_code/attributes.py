"""Where a step writes: attributes of its module tree, and what Python modules and classes hold.

Of the latter no rule of the contract knows: each stage would write it for itself, and so would
every look at the step. So a step that writes it is refused: it is looked at before and after a
second run of the step, which caches no more.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.users_code.snapshot import (
    Look,
    containers_in,
    is_same_look,
    look_at,
    refill,
)
from lightning_pipeoffload.runtime.users_code.users_lines import (
    calling_line,
    is_librarys_file,
    is_users,
)

GONE = object()  # the value of a name that is not there
REGISTRIES = frozenset(nn.Module().__dict__)  # what torch keeps among a module's attributes


@dataclass(frozen=True, eq=False)
class Variable:
    """An attribute of a part of the user's module.

    Attributes:
        path: The name of the part.
        part: The part.
        name: The name of the attribute.
    """

    path: str
    part: nn.Module
    name: str

    @property
    def key(self) -> tuple[int, str]:
        """What tells it from others."""
        return id(self.part), self.name

    @property
    def label(self) -> str:
        """What messages call it."""
        return ".".join(filter(None, ("self", self.path, self.name)))

    @property
    def value(self) -> Any:
        """The value that it has now."""
        return vars(self.part).get(self.name, GONE)

    def put(self, value: Any) -> None:
        """Give it a value, or take it away where that is :data:`GONE`."""
        if value is GONE:
            vars(self.part).pop(self.name, None)
        else:
            vars(self.part)[self.name] = value


def variables(module: nn.Module) -> Iterator[Variable]:
    """Yield all attributes of a module tree but its parameters, buffers and modules."""
    for path, part in module.named_modules():
        for name in vars(part).keys() - REGISTRIES:
            yield Variable(path, part, name)


class Snapshot:
    """What attributes, the containers in them and some tensors hold at one moment."""

    def __init__(self, variables: Iterable[Variable], tensors: Iterable[Tensor] = ()) -> None:
        self._values = [(variable, variable.value) for variable in variables]
        self._insides = [(c, c.copy()) for _, value in self._values for c in containers_in(value)]
        self._tensors = [(tensor, tensor.clone()) for tensor in tensors]

    def put_back(self) -> None:
        """Let them hold it again."""
        for variable, value in self._values:
            variable.put(value)
        for container, contents in self._insides:
            refill(container, contents)
        for tensor, value in self._tensors:
            tensor.copy_(value)


class Place(NamedTuple):
    """A place in the step.

    Attributes:
        segment: The segment of the step.
        is_in_block: Whether it is in the segment's block, not in the step around it.
    """

    segment: int
    is_in_block: bool


class Write(NamedTuple):
    """A write to an attribute.

    Attributes:
        variable: The attribute.
        place: Where in the step.
        line: The line of the user's code; "" where it was found later.
        is_users: Whether the user's code writes, not a library's of its own.
    """

    variable: Variable
    place: Place
    line: str
    is_users: bool


class WriteWatch:
    """Notes what one run of a step writes to attributes.

    Attributes:
        writes: The writes, in their order.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._paths = {part: path for path, part in module.named_modules()}
        self._place = Place(0, is_in_block=False)
        self._seen: dict[tuple[int, str], tuple[Variable, Look]] = {}
        self._held: dict[tuple[int, str], None] = {}  # whose values can be changed in place
        self.writes: list[Write] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what is written inside."""
        for variable in variables(self._module):
            self._see(variable)
        plain = nn.Module.__setattr__

        def note(part: nn.Module, name: str, value: Any) -> None:
            is_same = vars(part).get(name, GONE) is value and not _can_change(value)
            plain(part, name, value)
            if part in self._paths and name in vars(part) and not is_same:
                variable = Variable(self._paths[part], part, name)
                is_users_file = not is_librarys_file(sys._getframe(1).f_code.co_filename)
                self.writes.append(Write(variable, self._place, calling_line(), is_users_file))
                self._see(variable)

        nn.Module.__setattr__ = note  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = plain  # type: ignore[method-assign]

    def _see(self, variable: Variable) -> None:
        value, key = variable.value, variable.key
        self._held.pop(key, None)
        if _can_change(value):
            self._held[key] = None
        self._seen[key] = variable, look_at(value) if key in self._held else [(value, 0)]

    def look(self, place: Place) -> None:
        """Note what has changed otherwise since the last look, at the end of a place."""
        with torch._C.DisableTorchFunction():  # private: this is no call of the step's
            for variable, before in [self._seen[key] for key in self._held]:
                if not is_same_look(before, look_at(variable.value)):
                    self._note(variable, place)
        self._place = Place(place.segment + place.is_in_block, not place.is_in_block)

    def finish(self) -> None:
        """Note what has changed in another way than by assigning to an attribute."""
        end = Place(self._place.segment, is_in_block=False)
        now = {variable.key: variable for variable in variables(self._module)}
        for key in now.keys() - self._seen.keys():
            self._note(now[key], end)
        for variable, before in [*self._seen.values()]:
            if variable.value is not before[0][0]:
                self._note(variable, end)

    def _note(self, variable: Variable, place: Place) -> None:
        is_own = is_users(type(variable.part).__module__)
        self.writes.append(Write(variable, place, "", is_own))
        self._see(variable)


def _can_change(value: Any) -> bool:
    if isinstance(value, (Tensor, np.ndarray, list, dict, set, deque)):
        return True
    kind = type(value)
    return hasattr(value, "__dict__") and not callable(value) and is_users(kind.__module__)


# What Python modules and classes hold


Beside = dict[str, Look]
"""A look at each variable of a Python module or class, by its name."""


def look_beside(module: nn.Module) -> Beside:
    """Look at what the classes of a module tree, and the Python modules around them, hold."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    found: Beside = {}
    for home in _reachable({kind.__module__ for kind in kinds}):
        kinds.update(value for value in vars(home).values() if isinstance(value, type))
        found |= _look(home.__name__, home)
    for kind in kinds:
        if is_users(kind.__module__):
            found |= _look(kind.__qualname__, kind)
    return found


def refuse_written(before: Beside, after: Beside) -> None:
    """Refuse a step between two looks if it has written any of this.

    Raises:
        ValueError: It has.
    """
    changed = [n for n, look in after.items() if not is_same_look(before.get(n, []), look)]
    if changed:
        raise ValueError(
            f"the step writes {', '.join(sorted(changed))}, which a Python module or a class "
            f"holds: each stage would write it for itself. Keep it in an attribute of the module "
            f"(self.seen = [] in __init__), or write it in a hook"
        )


def _look(owner: str, space: Any) -> Beside:
    return {
        f"{owner}.{name}": look_at(value)
        for name, value in vars(space).items()
        if not (name.startswith("__") or _is_definition(value))
    }


def _is_definition(value: Any) -> bool:
    return (
        isinstance(value, (type, ModuleType, nn.Module))
        or callable(value)
        or hasattr(type(value), "__get__")
    )


def _reachable(names: set[str]) -> Iterator[ModuleType]:
    known: set[str] = set()
    left = sorted(names)
    while left:
        name = left.pop()
        if name in known or not is_users(name) or name not in sys.modules:
            continue
        known.add(name)
        yield sys.modules[name]
        for value in vars(sys.modules[name]).values():
            is_module = isinstance(value, ModuleType)
            left.append(value.__name__ if is_module else getattr(value, "__module__", None) or "")

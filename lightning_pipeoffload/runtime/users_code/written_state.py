"""What steps write and blocks read beside their arguments, kept for those that run again in B.

``self.mask = batch["mask"]``, read in the blocks: when a checkpoint runs a block again, other
microbatches have written it since. So what a step writes is found when it is probed, and each
checkpoint keeps what was there when it ran.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_pipeoffload.runtime.users_code.libraries import is_foundations, is_users
from lightning_pipeoffload.runtime.users_code.look import is_same_look
from lightning_pipeoffload.runtime.users_code.module_snapshot import (
    Attribute,
    containers_in,
    look_into,
    parts_of,
    refill,
)
from lightning_pipeoffload.runtime.users_code.namespaces import REGISTRIES, reachable

_DEFINITIONS = (type, FunctionType, ModuleType, staticmethod, classmethod, property)
_NO_OBJECTS = (*_DEFINITIONS, nn.Module, Tensor, Enum)
_LONGEST = 10_000  # of a container that a step may write; a longer one is data
_GONE = object()


@dataclass(frozen=True, eq=False)
class Space:
    """A namespace: the attributes or buffers of a module, a class, a Python module, an object.

    Attributes:
        holder: whose it is.
        label: its name for messages.
        is_buffers: it is the module's buffers.
    """

    holder: Any
    label: str
    is_buffers: bool = False

    @property
    def key(self) -> tuple[int, bool]:
        """What tells it from others."""
        return id(self.holder), self.is_buffers

    @property
    def contents(self) -> Mapping[str, Any]:
        """Its values by name."""
        found: Mapping[str, Any] = vars(self.holder)
        return found["_buffers"] if self.is_buffers else found

    def names(self) -> list[str]:
        """List what a step may write."""
        is_shared = not isinstance(self.holder, nn.Module)
        return [
            name
            for name, value in self.contents.items()
            if name not in REGISTRIES and not (is_shared and _is_definition(name, value))
        ]

    def put(self, name: str, value: Any) -> None:
        """Give a name its value, or take it away."""
        if isinstance(self.holder, type):
            if value is not _GONE:
                setattr(self.holder, name, value)
            elif name in self.contents:
                delattr(self.holder, name)
        elif value is _GONE:
            self.contents.pop(name, None)  # type: ignore[attr-defined] # a dict, as all but a class
        else:
            self.contents[name] = value  # type: ignore[index]


def _is_definition(name: str, value: Any) -> bool:
    is_table = isinstance(value, Sized) and not isinstance(value, Tensor) and len(value) > _LONGEST
    return name.startswith("__") or is_table or isinstance(value, _DEFINITIONS)


def spaces_of(module: nn.Module) -> list[Space]:
    """List the namespaces that the steps of ``module`` may write."""
    spaces = []
    for path, child in module.named_modules():
        spaces += [Space(child, path), Space(child, path, is_buffers=True)]
    classes = {kind for child in module.modules() for kind in type(child).__mro__}
    own = [kind for kind in classes if not is_foundations(kind.__module__)]
    spaces += [Space(kind, kind.__qualname__) for kind in own]
    spaces += [Space(place, place.__name__) for place in _python_modules_of(own)]
    found = {space.key: space for space in spaces}
    left = deque(found.values())
    while left:  # objects in objects
        for space in _objects_in(left.popleft()):
            if space.key not in found:
                found[space.key] = space
                left.append(space)
    return list(found.values())


def _objects_in(space: Space) -> Iterator[Space]:
    """Yield the namespaces of objects of the user's that have a name in this one."""
    prefix = "self." if isinstance(space.holder, nn.Module) else ""
    for name in space.names():
        value = space.contents[name]
        if is_plain_object(value):
            yield Space(value, prefix + Variable(space, name).label)


def is_plain_object(value: Any) -> bool:
    """Whether this is an object of a class of the user's, which is no module, with attributes."""
    kind = type(value)
    if isinstance(value, _NO_OBJECTS) or not hasattr(value, "__dict__"):
        return False
    # A class that looks at its subclasses would see one that stands in for it.
    looks_on = any("__init_subclass__" in vars(base) for base in kind.__mro__[:-1])
    return is_users(kind.__module__) and not looks_on and kind.__weakrefoffset__ != 0


def _python_modules_of(kinds: Iterable[type[Any]]) -> list[ModuleType]:
    """List the Python modules of classes, and those of the user's that their code may write."""
    homes = [sys.modules[kind.__module__] for kind in kinds if kind.__module__ in sys.modules]
    names = {home.__name__ for home in homes}
    for home in homes:
        names |= {value.__name__ for value in vars(home).values() if isinstance(value, ModuleType)}
    found = dict.fromkeys((*homes, *reachable(names)))
    return [place for place in found if not is_foundations(place.__name__)]


@dataclass(frozen=True, eq=False)
class Variable:
    """One name in a namespace."""

    space: Space
    name: str

    @property
    def label(self) -> str:
        """Its name for messages."""
        return f"{self.space.label}.{self.name}".lstrip(".")

    @property
    def value(self) -> Any:
        """What it is now."""
        return self.space.contents.get(self.name, _GONE)


@contextmanager
def noting_writes(module: nn.Module) -> Iterator[list[Variable]]:
    """Note what is written inside; the list is filled at the end."""
    spaces = spaces_of(module)
    before = {space: {name: space.contents[name] for name in space.names()} for space in spaces}
    inside = {(s, name): look_into(v) for s, found in before.items() for name, v in found.items()}
    written: list[Variable] = []
    with _noting_assignments() as assigned:
        yield written
    for space, old in before.items():
        for name in dict.fromkeys((*old, *space.names())):
            value = space.contents.get(name, _GONE)
            is_new = value is not old.get(name, _GONE) or (id(space.holder), name) in assigned
            if is_new or not is_same_look(inside.get((space, name), []), look_into(value)):
                written.append(Variable(space, name))


@contextmanager
def _noting_assignments() -> Iterator[set[tuple[int, str]]]:
    """Note the attributes of modules that are assigned, be it what they are already."""
    assigned = set()
    plain = nn.Module.__setattr__

    def note(self: nn.Module, name: str, value: Any) -> None:
        assigned.add((id(self), name))
        plain(self, name, value)

    nn.Module.__setattr__ = note  # type: ignore[method-assign]
    try:
        yield assigned
    finally:
        nn.Module.__setattr__ = plain  # type: ignore[method-assign]


class WrittenState:
    """What the steps of one module write."""

    def __init__(self) -> None:
        self._variables: dict[tuple[tuple[int, bool], str], Variable] = {}
        self._in_place: set[tuple[int, str]] = set()

    def expect(self, variables: Iterable[Variable], in_place: Iterable[Attribute]) -> None:
        """Learn what a step writes.

        Args:
            variables: that it assigns, or changes the parts of.
            in_place: whose tensors it writes.
        """
        self._variables.update(((v.space.key, v.name), v) for v in variables)
        for module, name in in_place:
            if name in REGISTRIES:
                continue
            self._in_place.add((id(module), name))
            space = Space(module, type(module).__name__, name in module._buffers)
            self._variables.setdefault((space.key, name), Variable(space, name))

    def __bool__(self) -> bool:
        return bool(self._variables)

    def keep(self) -> Kept | None:
        """Keep what is there now; None: steps write nothing."""
        return Kept(self._look(self._copy)) if self._variables else None

    def _look(self, copy: Callable[[Variable], Any]) -> list[tuple[Variable, Any]]:
        return [(variable, copy(variable)) for variable in self._variables.values()]

    def _copy(self, variable: Variable) -> Any:
        value = variable.value
        is_written = (id(variable.space.holder), variable.name) in self._in_place
        return value.clone() if is_written and type(value) is Tensor else value


class Kept:
    """What there was at one moment.

    Args:
        values: of each variable.
    """

    def __init__(self, values: list[tuple[Variable, Any]]) -> None:
        self._values = values
        self._insides = [_contents_of(value) for _, value in values]

    def changed(self) -> list[str]:
        """Name what is not the same any more."""
        pairs = zip(self._values, self._insides, strict=True)
        return [
            variable.label
            for (variable, value), inside in pairs
            if value is not variable.value
            or not is_same_look([(c, parts_of(then)) for c, then in inside], look_into(value))
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let it be there again; afterwards everything is as if nothing had run inside."""
        now = Kept([(variable, variable.value) for variable, _ in self._values])
        own = [(place, place.copy()) for inside in self._insides for place, _ in inside]
        self._put()
        try:
            yield
        finally:
            for place, contents in own:
                refill(place, contents)
            now._put()

    def _put(self) -> None:
        for variable, value in self._values:
            variable.space.put(variable.name, value)
        for inside in self._insides:
            for place, contents in inside:
                refill(place, contents)


def _contents_of(value: Any) -> list[tuple[Any, Any]]:
    return [(place, place.copy()) for place in containers_in(value)]

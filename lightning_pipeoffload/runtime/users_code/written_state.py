"""What steps write and blocks read beside their arguments, kept for those that run again in B.

``self.mask = batch["mask"]``, read in the blocks: when a checkpoint runs a block again, other
microbatches have written it since. So what a step writes is found when it is probed, and each
checkpoint keeps what was there when it ran.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
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
from lightning_pipeoffload.runtime.users_code.namespaces import (
    GONE,
    REGISTRIES,
    Namespace,
    classes_in,
    reachable,
)
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line

_DEFINITIONS = (type, FunctionType, ModuleType, staticmethod, classmethod, property)
_NO_OBJECTS = (*_DEFINITIONS, nn.Module, Tensor, Enum)
_LONGEST = 10_000  # of a container that a step may write; a longer one is data


def written_namespaces(module: nn.Module) -> list[Namespace]:
    """List the namespaces that the steps of ``module`` may write."""
    found = []
    for path, part in module.named_modules():
        found += [Namespace.of_part(path, part), Namespace.of_part(path, part, is_buffers=True)]
    classes = {kind for part in module.modules() for kind in type(part).__mro__}
    own = [kind for kind in classes if not is_foundations(kind.__module__)]
    found += [Namespace(kind, kind.__qualname__) for kind in own]
    places = _python_modules_of(own)
    found += [Namespace(place, place.__name__) for place in places]
    found += [Namespace(kind, kind.__qualname__) for kind in classes_in(places) - set(own)]
    known = {namespace.key: namespace for namespace in found}
    left = deque(known.values())
    while left:  # objects in objects
        for namespace in _objects_in(left.popleft()):
            if namespace.key not in known:
                known[namespace.key] = namespace
                left.append(namespace)
    return list(known.values())


def _objects_in(namespace: Namespace) -> Iterator[Namespace]:
    """Yield the namespaces of objects of the user's that have a name in this one."""
    for name, value in _writable(namespace).items():
        if is_plain_object(value):
            yield Namespace(value, Variable(namespace, name).label)


def _writable(namespace: Namespace) -> dict[str, Any]:
    """Return what a step may write, by name."""
    found = namespace.variables()
    if not namespace.is_shared:
        return found
    return {name: value for name, value in found.items() if not _is_definition(value)}


def _is_definition(value: Any) -> bool:
    is_table = isinstance(value, Sized) and not isinstance(value, Tensor) and len(value) > _LONGEST
    return is_table or isinstance(value, _DEFINITIONS)


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

    namespace: Namespace
    name: str

    @property
    def label(self) -> str:
        """What messages call the variable."""
        return f"{self.namespace.name}.{self.name}"

    @property
    def value(self) -> Any:
        """The value that the variable has now."""
        return self.namespace.contents.get(self.name, GONE)


@contextmanager
def noting_writes(module: nn.Module) -> Iterator[list[Variable]]:
    """Note what is written inside; the list is filled at the end."""
    before = [
        (namespace, {n: (v, look_into(v)) for n, v in _writable(namespace).items()})
        for namespace in written_namespaces(module)
    ]
    written: list[Variable] = []
    with noting_assignments() as assigned:
        yield written
    for namespace, old in before:
        for name in dict.fromkeys((*old, *_writable(namespace))):
            value, (was, inside) = namespace.contents.get(name, GONE), old.get(name, (GONE, []))
            is_new = value is not was or (id(namespace.owner), name) in assigned
            if is_new or not is_same_look(inside, look_into(value)):
                written.append(Variable(namespace, name))


@contextmanager
def noting_assignments() -> Iterator[dict[tuple[int, str], str]]:
    """Note the attributes of modules that are assigned, be it what they are already.

    Yields:
        The line of the user's that assigned each last, by the module's id and the name.
    """
    assigned = {}
    plain = nn.Module.__setattr__

    def note(self: nn.Module, name: str, value: Any) -> None:
        assigned[id(self), name] = calling_line()
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
            variables: The variables that the step assigns, or changes the parts of.
            in_place: The attributes whose tensors it writes in place.
        """
        self._variables.update(((v.namespace.key, v.name), v) for v in variables)
        for module, name in in_place:
            if name in REGISTRIES:
                continue
            self._in_place.add((id(module), name))
            namespace = Namespace(module, type(module).__name__, name in module._buffers)
            self._variables.setdefault((namespace.key, name), Variable(namespace, name))

    def __bool__(self) -> bool:
        return bool(self._variables)

    @property
    def variables(self) -> list[Variable]:
        """The variables that are written."""
        return list(self._variables.values())

    def keep(self) -> Kept | None:
        """Keep what is there now; None: steps write nothing."""
        return Kept(self._look(self._copy)) if self._variables else None

    def _look(self, copy: Callable[[Variable], Any]) -> list[tuple[Variable, Any]]:
        return [(variable, copy(variable)) for variable in self._variables.values()]

    def _copy(self, variable: Variable) -> Any:
        value = variable.value
        is_written = (id(variable.namespace.owner), variable.name) in self._in_place
        return value.clone() if is_written and type(value) is Tensor else value


class Kept:
    """What there was at one moment.

    Args:
        values: The value of each variable.
    """

    def __init__(self, values: list[tuple[Variable, Any]]) -> None:
        self._values = values
        self._copied = [
            (variable, value, variable.value)
            for variable, value in values
            if isinstance(value, Tensor) and value is not variable.value
        ]
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

    def put_back(self) -> None:
        """Let it be there again, in the same tensors."""
        self._put()
        for variable, value, tensor in self._copied:
            tensor.copy_(value)
            variable.namespace.put(variable.name, tensor)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let it be there again, inside; afterwards all is as if nothing had run there."""
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
            variable.namespace.put(variable.name, value)
        for inside in self._insides:
            for place, contents in inside:
                refill(place, contents)


def _contents_of(value: Any) -> list[tuple[Any, Any]]:
    return [(place, place.copy()) for place in containers_in(value)]

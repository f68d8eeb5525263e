"""Finds what the user's code draws from and collects in, beside the attributes of its modules.

torch's, numpy's and Python's global generators are seeded for each microbatch, see
:mod:`.randomness`, and attributes are seen to by :mod:`.module_snapshot` and :mod:`.step_writes`.
What is found here has a state that can be read and set back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from lightning_pipeoffload.runtime.users_code.libraries import is_opaque, is_users
from lightning_pipeoffload.runtime.users_code.namespaces import (
    GONE,
    NAMES,
    Namespace,
    namespaces,
)
from lightning_pipeoffload.runtime.users_code.rewindable import Rewindable
from lightning_pipeoffload.runtime.users_code.source_kinds import (
    SourceKind,
    collection_kind,
    generator_kind,
    is_iterator,
)

_DEPTH = 3
_MOST_PARTS = 1000  # a longer container is data
_OPEN = (Namespace, list, deque, dict, CellType)
_WITHOUT_PARTS = frozenset((int, float, bool, str, bytes, type(None)))


@dataclass(frozen=True)
class Place:
    """Where something is to be found, though it may be another object by then.

    Attributes:
        namespace: The namespace in which the way there starts.
        keys: What leads from value to value on that way.
    """

    namespace: Namespace
    keys: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """The place as it can be said to the user."""
        return ".".join(map(str, (self.namespace.name, *self.keys)))

    @property
    def top(self) -> Place:
        """The name in the namespace that leads there."""
        return Place(self.namespace, self.keys[:1])

    def exists(self) -> bool:
        """Whether the namespace has the name that leads there."""
        return self.keys[0] in self.namespace.contents

    def remove(self) -> None:
        """Take the name that leads there out of the namespace."""
        self.namespace.put(self.keys[0], GONE)

    def find(self) -> Any:
        """Return what is there; None if nothing is."""
        if not self.keys:
            return self.namespace
        first, *more = self.keys
        value = self.namespace.contents.get(first)
        for key in more:
            value = dict(_parts(value, self.namespace.is_shared)).get(key)
        return value

    def put(self, value: Any) -> None:
        """Put something there, if :attr:`is_open`."""
        *_, key = self.keys
        holder = self._holder()
        if isinstance(holder, Namespace):
            holder.put(key, value)
        elif isinstance(holder, (list, deque, dict)):
            holder[key] = value
        elif isinstance(holder, CellType):
            holder.cell_contents = value
        else:
            vars(holder)[key] = value

    @property
    def is_open(self) -> bool:
        """Whether something else can be put there."""
        holder = self._holder()
        return isinstance(holder, _OPEN) or is_users(type(holder).__module__)

    def _holder(self) -> Any:
        return Place(self.namespace, self.keys[:-1]).find()


@dataclass(frozen=True)
class Source:
    """Something with a state.

    Attributes:
        place: Where it is.
        kind: How its state is read and set back.
    """

    place: Place
    kind: SourceKind


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The state that an object had."""

    kind: SourceKind
    found: Any
    state: Any

    def restore(self) -> None:
        """Set the state back."""
        self.kind.write(self.found, self.state)


def find_sources(module: nn.Module) -> list[Source]:
    """List what is reachable from a module; iterators are made such that they can go back."""
    return list(_Walk().over(module))


def take_snapshot(source: Source) -> Snapshot | None:
    """Read a state; None where there is nothing any more, or not yet."""
    found = source.place.find()
    if found is None or _kind_of(found, source.place) is not source.kind:
        return None
    return Snapshot(source.kind, found, source.kind.read(found))


def make_rewindable(sources: Iterable[Source]) -> None:
    """Let iterators go back that the user's code has put where others were."""
    for source in sources:
        found = source.place.find()
        if is_iterator(found) and source.place.is_open:
            source.place.put(Rewindable(found))


def forget_readings(sources: Iterable[Source]) -> None:
    """Do not go back any more to where iterators were."""
    for source in sources:
        found = source.place.find()
        if isinstance(found, Rewindable):
            found.forget()


class _Walk:
    """One walk over all that is reachable, which comes to each object once."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._replaced: dict[int, Rewindable] = {}

    def over(self, module: nn.Module) -> Iterator[Source]:
        """Yield the sources."""
        for namespace in namespaces(module):
            if namespace.is_shared:
                yield Source(Place(namespace), NAMES)
            for name, value in namespace.variables().items():
                yield from self._look(Place(namespace, (name,)), value)

    def _look(self, place: Place, value: Any) -> Iterator[Source]:
        if type(value) in _WITHOUT_PARTS:
            return
        if is_iterator(value) and place.is_open:
            value = self._replace(place, value)
        if id(value) in self._known:
            return
        self._known.add(id(value))
        kind = _kind_of(value, place)
        if kind is not None:
            yield Source(place, kind)
        if kind is None or not kind.draws:
            yield from self._look_into(place, value)

    def _look_into(self, place: Place, value: Any) -> Iterator[Source]:
        if len(place.keys) > _DEPTH or _is_long(value):
            return
        for key, part in _parts(value, place.namespace.is_shared):
            yield from self._look(Place(place.namespace, (*place.keys, key)), part)

    def _replace(self, place: Place, iterator: Any) -> Any:
        place.put(self._replaced.setdefault(id(iterator), Rewindable(iterator)))
        return place.find()


def _kind_of(value: Any, place: Place) -> SourceKind | None:
    if isinstance(value, Namespace):
        return NAMES
    return generator_kind(value) or (collection_kind(value) if place.namespace.is_shared else None)


def _is_long(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict, deque)) and len(value) > _MOST_PARTS


def _parts(value: Any, is_shared: bool) -> Iterable[tuple[Any, Any]]:
    """Return what is one step from a value, each with what it is called there."""
    if isinstance(value, dict):
        return dict.items(value)  # a library's own might load what it holds only then
    if isinstance(value, (list, tuple, deque)):
        return enumerate(value)
    if isinstance(value, CellType):
        return _contents(value)
    if isinstance(value, (FunctionType, MethodType, BuiltinMethodType, partial)):
        return _parts_of_call(value)
    return _attributes(value, is_shared).items()


def _contents(cell: CellType) -> list[tuple[str, Any]]:
    try:
        return [("contents", cell.cell_contents)]
    except ValueError:  # it is empty
        return []


def _parts_of_call(call: Any) -> list[tuple[str, Any]]:
    if isinstance(call, BuiltinMethodType):
        return [("__self__", call.__self__)]
    if isinstance(call, MethodType):
        return [("__self__", call.__self__), ("__func__", call.__func__)]
    if isinstance(call, partial):
        return [("func", call.func), ("args", call.args), ("keywords", call.keywords)]
    if not is_users(call.__module__):
        return []
    cells = zip(call.__code__.co_freevars, call.__closure__ or (), strict=False)
    return [*cells, ("__defaults__", call.__defaults__), ("__kwdefaults__", call.__kwdefaults__)]


def _attributes(value: Any, is_shared: bool) -> dict[str, Any]:
    """Return the attributes of an object, which in a shared namespace has to be the user's."""
    is_users_own = is_users(type(value).__module__)
    is_known = is_users_own if is_shared else not is_opaque(value, may_draw=True)
    if not is_known or isinstance(value, (nn.Module, Tensor, type, ModuleType)):
        return {}
    return getattr(value, "__dict__", {})

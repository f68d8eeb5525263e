"""Which attributes of an object some code writes, and what happens when they are used.

The steps of a module may collect: ``self.outputs.append(loss)``. On the rank of the last stage they
do, on the others they never come so far. So each rank watches what its steps write; where another
one's are used, they are not here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType, MethodType
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_pipeoffload.runtime.users_code.instance_class import subclass_like
from lightning_pipeoffload.runtime.users_code.libraries import is_users
from lightning_pipeoffload.runtime.users_code.look import Look, is_same_look, version_of
from lightning_pipeoffload.runtime.users_code.namespaces import Namespace
from lightning_pipeoffload.runtime.users_code.shared_uses import watching_classes
from lightning_pipeoffload.runtime.users_code.written_state import Variable

_DEPTH = 2
_MOST_PARTS = 64  # a longer container is a table, of which the length tells enough
# Looked at in every microbatch: to ask whether they are a Mapping or a Metric takes longest.
_WITHOUT_PARTS = {int, float, bool, str, type(None), FunctionType, MethodType}
_FOREIGN = (nn.Module, pl.Trainer, pl.LightningDataModule, type)


class WrittenAttributes:
    """Watches an object's attributes; buffers of a module are among them, and what classes have.

    Args:
        owner: The object that is watched.
        ignored: Names of attributes that are not the user's.

    Attributes:
        names: The names of attributes that were written so far.
    """

    def __init__(self, owner: object, ignored: Set[str]) -> None:
        self._owner = owner
        self._ignored = ignored
        self._of_classes = _values_of_classes(owner)
        self.names: set[str] = set()

    def watching(self) -> AbstractContextManager[None]:
        """Note the attributes that are written inside."""
        return _Watch(self)

    def look(self) -> dict[str, Look]:
        """Look at all attributes that may be written for the first time."""
        attributes = vars(self._owner)
        found = {
            name: _look(vars(cls).get(name))
            for name, cls in self._of_classes.items()
            if name not in self._ignored and name not in self.names
        }
        for space in (attributes, attributes.get("_buffers", {})):
            # A difference of sets, not one question for each of Lightning's forty attributes.
            for name in space.keys() - self._ignored - self.names:
                found[name] = _look(space[name])
        return found


def _values_of_classes(owner: object) -> dict[str, type[Any]]:
    """Return where values are that the user's classes have: ``losses = []``."""
    return {
        name: cls
        for cls in reversed(type(owner).__mro__)
        if is_users(cls.__module__)
        for name, value in vars(cls).items()
        if not (name.startswith("__") or callable(value) or hasattr(value, "__get__"))
    }


class _Watch:
    """A class, not a generator: a step that leaves through here would be thrown into it."""

    def __init__(self, written: WrittenAttributes) -> None:
        self._written = written

    def __enter__(self) -> None:
        self._before = self._written.look()

    def __exit__(self, *error: object) -> None:
        for name, after in self._written.look().items():
            if not is_same_look(self._before.get(name, []), after):
                self._written.names.add(name)


def _look(value: Any, depth: int = _DEPTH) -> Look:
    """Look at a value, its parts and theirs."""
    if isinstance(value, Tensor):
        return [(value, version_of(value))]
    parts = _parts(value)
    found: Look = [(value, len(parts))]
    if depth and len(parts) <= _MOST_PARTS:
        for part in parts:
            found += _look(part, depth - 1)
    return found


def _parts(value: Any) -> Sequence[Any]:
    if type(value) in _WITHOUT_PARTS:
        return ()
    if isinstance(value, (dict, Mapping)):
        return list(value.values())
    if isinstance(value, (list, tuple, set, deque)):
        return list(value)
    if isinstance(value, Metric) or not (isinstance(value, _FOREIGN) or callable(value)):
        return list(getattr(value, "__dict__", {}).values())
    return []


@contextmanager
def attributes_watched(
    owner: object, names: Set[str], on_use: Callable[[str], None]
) -> Iterator[None]:
    """Call ``on_use(name)`` before an attribute of ``owner`` in ``names`` is read.

    What its classes have is watched by the name of the class too.
    """
    plain = type(owner)
    of_classes = [
        Variable(Namespace(cls, cls.__qualname__), name)
        for name, cls in _values_of_classes(owner).items()
        if name in names
    ]

    def getattribute(self: object, name: str) -> Any:
        if name in names:
            on_use(name)
        return plain.__getattribute__(self, name)

    owner.__class__ = subclass_like(plain, {"__getattribute__": getattribute})
    try:
        with watching_classes(of_classes, lambda variable, frame: on_use(variable.name)):
            yield
    finally:
        owner.__class__ = plain

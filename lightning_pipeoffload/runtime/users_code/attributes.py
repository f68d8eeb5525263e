"""The attributes of a module tree, and where in its step the user's code writes them."""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.users_code.libraries import is_librarys_file, is_users
from lightning_pipeoffload.runtime.users_code.look import Look, is_same_look, version_of
from lightning_pipeoffload.runtime.users_code.module_snapshot import look_into
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line

_LARGEST = 1 << 24  # bytes of an array; a larger one is data
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

    Args:
        module: The user's module.

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


def look_at(value: Any) -> Look:
    """Look at a value, at containers in it, and at their tensors."""
    inside = look_into(value)
    tensors = [part for _, parts in inside for part in parts if isinstance(part, Tensor)]
    own = version_of(value) if isinstance(value, Tensor) else 0
    if isinstance(value, np.ndarray) and value.nbytes <= _LARGEST:
        own = zlib.crc32(value.tobytes())
    return [(value, own), *inside, *((tensor, version_of(tensor)) for tensor in tensors)]

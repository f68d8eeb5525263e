"""Sees where in a step what it writes to keep is read and written.

``self.running_loss`` is written behind the blocks, where only the last stage comes: a stage that
reads it before them, in the next microbatch, would have an old one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.users_code.instance_class import own_class, subclass_like
from lightning_pipeoffload.runtime.users_code.libraries import is_librarys_file, is_users_file
from lightning_pipeoffload.runtime.users_code.look import Look, is_same_look, version_of
from lightning_pipeoffload.runtime.users_code.module_snapshot import look_into
from lightning_pipeoffload.runtime.users_code.shared_uses import (
    instructions,
    watch_again,
    watched_value,
    watching_classes,
    watching_names,
)
from lightning_pipeoffload.runtime.users_code.source_watch import Draw
from lightning_pipeoffload.runtime.users_code.users_lines import line_of
from lightning_pipeoffload.runtime.users_code.written_state import Variable, is_plain_object

_Key = tuple[int, str]
# A list that is empty stays as it is when it is cleared, so its contents do not tell.
_RESETS = {"clear", "reset", "zero_", "fill_", "copy_"}
_CONSTANTS = (int, float, complex, str, type(None))
_FILLS = {"add", "append", "appendleft", "extend", "insert", "update", "setdefault"}


class Use(NamedTuple):
    """A read or a write.

    Attributes:
        place: Where it is in the step.
        line: The line of the user's code; "" for a write that was found later.
    """

    place: Draw
    line: str


@dataclass
class Uses:
    """What a step does with one variable.

    Attributes:
        label: What messages call the variable.
        reads: Reads of what an earlier step has left there.
        writes: Writes of all kinds.
        is_assigned: Whether it is given other values, not only changed inside.
        reads_of_own: Reads of numbers and the like that this step has written, each with that
            write.
        last_write: The last write in this step.
    """

    label: str
    reads: list[Use] = field(default_factory=list)
    writes: list[Use] = field(default_factory=list)
    is_assigned: bool = False
    reads_of_own: list[tuple[Use, Use]] = field(default_factory=list)
    last_write: Use | None = None

    def read(self, use: Use, value: Any) -> None:
        """Note a read of a value; what can be changed inside may be a cache that others fill."""
        if self.last_write is None:
            self.reads.append(use)
        elif isinstance(value, _CONSTANTS):
            self.reads_of_own.append((use, self.last_write))

    def write(self, use: Use) -> None:
        """Note a write, once for each place."""
        known = [write for write in self.writes if write.place == use.place]
        if not known:
            self.writes.append(use)
        self.last_write = (known or [use])[0]

    def reads_that_count(self) -> list[Use]:
        """Return the reads but those that reach for a container to put something into it."""
        writing = {write.place for write in self.writes}
        return [read for read in self.reads if self.is_assigned or read.place not in writing]


class AttributeUses:
    """Watches variables in one run of a step.

    Args:
        module: The user's module.
        blocks: The blocks of the module.
        variables: The variables that some step writes.
    """

    def __init__(
        self, module: nn.Module, blocks: Iterable[nn.Module], variables: Iterable[Variable]
    ) -> None:
        self._module = module
        self._blocks = set(blocks)
        self._variables = list(variables)
        self._place = Draw(0, is_in_block=False)
        self._seen: list[Look] = []
        self._names = {variable.name for variable in self._variables}
        self._of_holder = {(id(v.namespace.owner), v.name): Uses(v.label) for v in self._variables}
        self._lines: dict[str, str] = {}  # that have written to a name last

    @property
    def found(self) -> dict[_Key, Uses]:
        """What is known of each variable, by the id of what holds it and its name."""
        return self._of_holder

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what is done with the variables."""
        with torch._C.DisableTorchFunction():  # private: a look is no call of the step's
            self._seen = [look_at(variable.value) for variable in self._variables]
        python_modules = self._held_by(ModuleType)
        of_classes = self._held_by(type)
        watched = [
            v.namespace.owner for v in self._variables if _is_watched_by_class(v.namespace.owner)
        ]
        holders = {id(holder): holder for holder in watched}
        with ExitStack() as stack:
            for part in (*self._module.modules(), *holders.values()):
                if self._has_any(part):
                    stack.enter_context(self._watched(part))
            if python_modules or of_classes:
                stack.enter_context(watching_classes(of_classes, self._read_shared))
                names = watching_names(
                    (*of_classes, *python_modules), self._read_shared, self._store_shared
                )
                stack.enter_context(names)
            yield

    def _held_by(self, kind: type[Any]) -> list[Variable]:
        return [v for v in self._variables if isinstance(v.namespace.owner, kind)]

    @contextmanager
    def _watched(self, part: Any) -> Iterator[None]:
        plain = type(part)
        methods = _watching_methods(plain, self._read, self._assign)
        if part in self._blocks:  # it has a class of its own, by which its calls are known
            methods = {**methods, "__call__": plain.__call__}
            part.__class__ = subclass_like(own_class(part), methods)
        else:
            part.__class__ = subclass_like(plain, methods)
        try:
            yield
        finally:
            part.__class__ = plain

    def _has_any(self, part: Any) -> bool:
        return any((id(holder), n) in self._of_holder for holder in _holders(part)
                   for n in self._names)  # fmt: skip

    def _uses_of(self, part: Any, name: str) -> Uses | None:
        if name not in self._names:
            return None
        keys = ((id(holder), name) for holder in _holders(part))
        return next((self._of_holder[key] for key in keys if key in self._of_holder), None)

    def _read(self, part: Any, name: str) -> None:
        uses = self._uses_of(part, name)
        if uses is not None:
            value = vars(part).get(name)
            self._note_read(uses, name, sys._getframe(2), value)  # behind the watching method

    def _read_shared(self, variable: Variable, frame: FrameType) -> None:
        uses = self._of_holder[id(variable.namespace.owner), variable.name]
        self._note_read(uses, variable.name, frame, watched_value(variable))

    def _store_shared(self, name: str, variable: Variable | None, line: str) -> None:
        self._lines[name] = line
        if variable is not None:
            uses = self._of_holder[id(variable.namespace.owner), name]
            uses.is_assigned = True
            uses.write(Use(self._place, line))

    def _note_read(self, uses: Uses, name: str, frame: FrameType, value: Any) -> None:
        if is_librarys_file(frame.f_code.co_filename):
            return
        method = _attribute_taken(frame)
        if method in _RESETS:
            uses.write(Use(self._place, _line_in(frame)))
        elif method in _FILLS:
            self._lines[name] = _line_in(frame)
        else:
            uses.read(Use(self._place, _line_in(frame)), value)

    def _assign(self, part: Any, name: str, value: Any) -> None:
        uses = self._uses_of(part, name)
        if uses is not None and vars(part).get(name) is not value:  # as += of a list assigns it
            uses.is_assigned = True
            uses.write(Use(self._place, _line_in(sys._getframe(2))))

    def look(self, place: Draw) -> None:
        """Note what was changed since the last look, which was at the border of another place."""
        for index, variable in enumerate(self._variables):
            before, now = self._seen[index], look_at(watched_value(variable))
            if not is_same_look(before, now):
                uses = self._of_holder[id(variable.namespace.owner), variable.name]
                uses.is_assigned |= before[0][0] is not now[0][0]
                uses.write(Use(place, self._lines.get(variable.name, "")))
                self._seen[index] = now
            watch_again(variable, self._read_shared)
        self._lines.clear()
        segment, is_in_block = place
        self._place = Draw(segment + is_in_block, not is_in_block)


def _is_watched_by_class(holder: Any) -> bool:
    return isinstance(holder, ModuleType) or is_plain_object(holder)


def _holders(part: Any) -> tuple[Any, ...]:
    return part, *type(part).__mro__


def _watching_methods(
    plain: type[Any],
    on_read: Callable[[Any, str], None],
    on_assign: Callable[[Any, str, Any], None],
) -> dict[str, Any]:
    def read(self: Any, name: str) -> Any:
        on_read(self, name)
        return plain.__getattribute__(self, name)  # type: ignore[call-arg]

    def assign(self: Any, name: str, value: Any) -> None:
        on_assign(self, name, value)
        plain.__setattr__(self, name, value)  # type: ignore[call-arg]

    return {"__getattribute__": read, "__setattr__": assign}


def _line_in(frame: FrameType) -> str:
    """Name the line that reads or assigns; "" if it is a library's."""
    file = frame.f_code.co_filename
    return line_of(file, frame.f_lineno) if is_users_file(file) else ""


def _attribute_taken(frame: FrameType) -> str:
    """Name the attribute that code takes of what it is reading; "" if none."""
    rest = (code for place, code in instructions(frame.f_code).items() if place > frame.f_lasti)
    following = next(rest, None)
    if following is None or following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
        return ""
    return str(following.argval)


def look_at(value: Any) -> Look:
    """Look at a value, at containers in it, and at their tensors."""
    inside = look_into(value)
    tensors = [part for _, parts in inside for part in parts if isinstance(part, Tensor)]
    own = version_of(value) if isinstance(value, Tensor) else 0
    return [(value, own), *inside, *((tensor, version_of(tensor)) for tensor in tensors)]

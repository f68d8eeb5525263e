"""Sees where code reads and writes what classes and Python modules have.

``type(self).counter`` and ``global COUNTER`` pass no method of the user's module. A class is asked
by a descriptor in the variable's place; of the globals only the interpreter knows.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType, ModuleType
from typing import Any

from lightning_pipeoffload.runtime.users_code.libraries import is_users_file
from lightning_pipeoffload.runtime.users_code.users_lines import line_of
from lightning_pipeoffload.runtime.users_code.written_state import Variable

NoteRead = Callable[[Variable, FrameType], None]
NoteStore = Callable[[str, Variable | None, str], None]

_LOADS = {"LOAD_GLOBAL", "LOAD_NAME"}
_STORES = {"STORE_GLOBAL", "STORE_NAME", "STORE_ATTR"}


class Watched:
    """Stands in a class for a variable, and tells who reads it.

    Args:
        variable: A variable of a class.
        note: A function that is called with the frame that reads.
    """

    def __init__(self, variable: Variable, note: NoteRead) -> None:
        self.value = variable.value
        self._variable = variable
        self._note = note

    def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
        self._note(self._variable, sys._getframe(1))
        return self.value


def watched_value(variable: Variable) -> Any:
    """Return what a variable is, whether it is watched or not."""
    value = variable.value
    return value.value if isinstance(value, Watched) else value


@contextmanager
def watching_classes(variables: Iterable[Variable], note: NoteRead) -> Iterator[None]:
    """Tell of reads of what classes have, by whatever name they go."""
    watched = list(variables)
    for variable in watched:
        watch_again(variable, note)
    try:
        yield
    finally:
        for variable in watched:
            variable.namespace.put(variable.name, watched_value(variable))


def watch_again(variable: Variable, note: NoteRead) -> None:
    """Tell of reads of what code has put into a class since."""
    is_there = variable.name in variable.namespace.contents
    if isinstance(variable.namespace.owner, type) and is_there and not is_watched(variable):
        variable.namespace.put(variable.name, Watched(variable, note))


def is_watched(variable: Variable) -> bool:
    """Whether there is what tells of reads."""
    return isinstance(variable.value, Watched)


@contextmanager
def watching_names(
    variables: Iterable[Variable], note: NoteRead, note_store: NoteStore
) -> Iterator[None]:
    """Tell of reads of globals, and of the lines that assign to anything of the variables' names.

    Args:
        variables: The variables of classes and Python modules.
        note: A function that is called with a variable and the frame that reads it.
        note_store: A function that is called with a name, the variable that it is if that is known,
            and the line that assigns to it.
    """
    trace, before = _NameTrace(variables, note, note_store), sys.gettrace()
    sys.settrace(trace.enter)
    try:
        yield
    finally:
        sys.settrace(before)


class _NameTrace:
    """Looks at the instructions of code that has one of the names, slowly."""

    def __init__(
        self, variables: Iterable[Variable], note: NoteRead, note_store: NoteStore
    ) -> None:
        found = list(variables)
        shared = [v for v in found if isinstance(v.namespace.owner, ModuleType)]
        self._names = {variable.name for variable in found}
        self._globals = {(id(v.namespace.contents), v.name): v for v in shared}
        self._note, self._note_store = note, note_store

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if self._names.isdisjoint(code.co_names) or not is_users_file(code.co_filename):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.go_on

    def go_on(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = instructions(frame.f_code).get(frame.f_lasti) if event == "opcode" else None
        if code is not None and code.argval in self._names:
            self._look(code, frame)
        return self.go_on

    def _look(self, code: dis.Instruction, frame: FrameType) -> None:
        is_attribute = code.opname == "STORE_ATTR"
        key = id(frame.f_globals), code.argval
        variable = None if is_attribute else self._globals.get(key)
        if code.opname in _STORES:
            line = line_of(frame.f_code.co_filename, frame.f_lineno)
            self._note_store(code.argval, variable, line)
        elif code.opname in _LOADS and variable is not None:
            self._note(variable, frame)


@cache
def instructions(code: CodeType) -> dict[int, dis.Instruction]:
    """Return the instructions of some code, by their place."""
    return {found.offset: found for found in dis.get_instructions(code)}

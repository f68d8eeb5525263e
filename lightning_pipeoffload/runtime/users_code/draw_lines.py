"""Finds the lines of the user's code at which something that is drawn from goes on."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning_pipeoffload.runtime.users_code.libraries import is_users_file
from lightning_pipeoffload.runtime.users_code.random_sources import Source, take_snapshot
from lightning_pipeoffload.runtime.users_code.source_kinds import is_same_state
from lightning_pipeoffload.runtime.users_code.users_lines import line_of


class _LineTrace:
    """Looks at sources before each line, slowly."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self.lines: dict[Source, list[str]] = {source: [] for source in sources}
        self._states = {source: take_snapshot(source) for source in self.lines}
        self._last = ("", 0)

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self.go_on if is_users_file(frame.f_code.co_filename) else None

    def go_on(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.look()
        self._last = frame.f_code.co_filename, frame.f_lineno
        return self.go_on

    def look(self) -> None:
        for source, before in self._states.items():
            now = self._states[source] = take_snapshot(source)
            if before and now and not is_same_state(before.state, now.state):
                self.lines[source].append(line_of(*self._last))


@contextmanager
def tracing_lines(sources: Iterable[Source]) -> Iterator[dict[Source, list[str]]]:
    """Yield what is filled with the lines at which each source goes on, in their order."""
    trace, before = _LineTrace(sources), sys.gettrace()
    sys.settrace(trace.enter)
    try:
        yield trace.lines
    finally:
        sys.settrace(before)
        trace.look()

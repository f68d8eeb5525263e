"""An iterator, or a file that is read line by line, which can go back to where it was."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

_END = object()


class _Reading(NamedTuple):
    """What was asked for, and what it gave."""

    asked: tuple[Any, ...]
    given: Any


class Rewindable:
    """Stands where an iterator was, and remembers what it gave while somebody may come back.

    Args:
        source: The user's iterator, which nobody else may read from now on.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._readings: deque[_Reading] = deque()
        self._num_forgotten = 0
        self._next = 0  # of the readings that are remembered
        self._remembers = False

    def position(self) -> int:
        """Return what :meth:`rewind` takes; from now on all is remembered."""
        self._remembers = True
        return self._num_forgotten + self._next

    def rewind(self, position: int) -> None:
        """Go back, or forth again."""
        self._next = position - self._num_forgotten

    def forget(self) -> None:
        """Do not come back to what lies behind."""
        self._remembers = False
        for _ in range(self._next):
            self._readings.popleft()
        self._num_forgotten += self._next
        self._next = 0

    def __iter__(self) -> Rewindable:
        return self

    def __next__(self) -> Any:
        return self._ask(("__next__",), lambda: next(self._source))

    def send(self, value: Any) -> Any:
        """Send to a generator."""
        return self._ask(("send", value), lambda: self._source.send(value))

    def readline(self, *size: int) -> Any:
        """Read from a file."""
        return self._ask(("readline", *size), lambda: self._source.readline(*size))

    def read(self, *size: int) -> Any:
        """Read from a file."""
        return self._ask(("read", *size), lambda: self._source.read(*size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __reduce__(self) -> Any:
        ahead = itertools.islice(self._readings, self._next, None)
        return itertools.chain, ([reading.given for reading in ahead], self._source)

    def _ask(self, asked: tuple[Any, ...], read: Callable[[], Any]) -> Any:
        is_known = self._next < len(self._readings)
        given = self._again(asked) if is_known else self._anew(asked, read)
        if given is _END:
            raise StopIteration
        return given

    def _again(self, asked: tuple[Any, ...]) -> Any:
        reading = self._readings[self._next]
        if reading.asked != asked:
            raise RuntimeError(
                f"the stages of a rank read a {type(self._source).__name__} of the step's "
                f"differently: {reading.asked} and {asked}; read alike in each microbatch, or "
                f"read in a block"
            )
        self._next += 1
        if not self._remembers:
            self.forget()
        return reading.given

    def _anew(self, asked: tuple[Any, ...], read: Callable[[], Any]) -> Any:
        try:
            given = read()
        except StopIteration:
            given = _END
        if self._remembers:
            self._readings.append(_Reading(asked, given))
            self._next += 1
        return given

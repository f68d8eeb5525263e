"""A lane of a CPU whose copies take as long as those of a slow link."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from lightning_pipeoffload.runtime.device import CopyError, Lane


class LateLane(Lane):
    """A thread that begins each copy late.

    Args:
        delay: Called with the bytes of each copy before it; sleeps, or waits for something.
    """

    def __init__(self, delay: Callable[[int], Any]) -> None:
        self._delay = delay
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._failure: CopyError | None = None

    def wait_for(self, event: Future[None]) -> None:
        """Make later copies wait for an event."""
        self._thread.submit(event.result)

    def copy(self, target: Tensor, source: Tensor, description: str) -> None:
        """Hand the copy to the thread."""
        self._last = self._thread.submit(self._copy_late, target, source, description)

    def record_event(self) -> Future[None]:
        """Return the last copy."""
        return self._last

    def make_compute_wait(self, event: Future[None]) -> None:
        """Block until a copy is done."""
        event.result()

    def _copy_late(self, target: Tensor, source: Tensor, description: str) -> None:
        if self._failure:  # a later copy fails too
            raise self._failure
        self._delay(source.nbytes)
        try:
            super().copy(target, source, description)
        except CopyError as error:
            self._failure = error
            raise

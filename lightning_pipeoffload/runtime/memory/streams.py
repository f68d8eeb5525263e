"""The lanes that copies run on, beside the compute lane; the device is behind this file.

A lane runs its copies in order. A moment marks a place in it, which another lane can wait for
without the host waiting. On an accelerator a lane is a stream and a moment an event; on CPU a copy
is done when the call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class CopyError(RuntimeError):
    """A copy between device and host failed; the message says of what."""


class Lane(Protocol):
    """Runs copies in order, on its own."""

    def wait_for_compute(self) -> None:
        """Let later copies wait for what the compute lane was given so far."""

    def wait_for(self, moment: Any) -> None:
        """Let later copies wait for a moment of any lane."""

    def copy(self, target: Tensor, source: Tensor, what: str) -> None:
        """Start a copy; the caller keeps both tensors until the lane has passed it.

        Args:
            target: The tensor that is written.
            source: The tensor that is read.
            what: What is copied, in words, for an error.

        Raises:
            CopyError: The copy cannot be started.
        """

    def mark(self) -> Any:
        """Return the moment at which the copies started so far are done."""

    def hold_compute(self, moment: Any) -> None:
        """Let the compute lane wait for a moment of this lane.

        Raises:
            CopyError: A copy before it has failed.
        """


class InlineLane:
    """For the CPU: each copy is done at once, so there is nothing to wait for."""

    def wait_for_compute(self) -> None:
        """Do nothing: every copy is done when its call returns."""

    def wait_for(self, moment: Any) -> None:
        """Do nothing: every copy is done when its call returns."""

    def copy(self, target: Tensor, source: Tensor, what: str) -> None:
        """Copy now."""
        _copy(target, source, what)

    def mark(self) -> None:
        """Return None: every copy is done, and needs no moment."""

    def hold_compute(self, moment: Any) -> None:
        """Do nothing: every copy is done when its call returns."""


class LateLane:
    """For the CPU: a thread that begins each copy late, as the end of it is over a slow link.

    For tests, and to rehearse the timing of a machine that is not there.

    Args:
        delay: A function that is called with the bytes of each copy before it, and sleeps, or waits
            for something.
    """

    def __init__(self, delay: Callable[[int], Any]) -> None:
        self._delay = delay
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._failure: CopyError | None = None

    def wait_for_compute(self) -> None:
        """Do nothing: the CPU has computed what it was given."""

    def wait_for(self, moment: Future[None]) -> None:
        """Let the thread wait for a moment."""
        self._thread.submit(moment.result)

    def copy(self, target: Tensor, source: Tensor, what: str) -> None:
        """Leave the copy to the thread."""
        self._last = self._thread.submit(self._copy_late, target, source, what)

    def mark(self) -> Future[None]:
        """Return the last copy."""
        return self._last

    def hold_compute(self, moment: Future[None]) -> None:
        """Block until the copy of that moment is done."""
        moment.result()

    def _copy_late(self, target: Tensor, source: Tensor, what: str) -> None:
        if self._failure:  # whoever waits for a later copy waits for this one too
            raise self._failure
        self._delay(source.nbytes)
        try:
            _copy(target, source, what)
        except CopyError as error:
            self._failure = error
            raise


class StreamLane:
    """A stream of an accelerator.

    Args:
        device: The device of the stream; its current stream is the compute lane.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def wait_for_compute(self) -> None:
        """Wait for the current stream."""
        self._stream.wait_event(torch.accelerator.current_stream().record_event())

    def wait_for(self, moment: torch.Event) -> None:
        """Wait for an event."""
        self._stream.wait_event(moment)

    def copy(self, target: Tensor, source: Tensor, what: str) -> None:
        """Enqueue the copy."""
        with self._stream:
            _copy(target, source, what)

    def mark(self) -> torch.Event:
        """Record an event."""
        return self._stream.record_event()

    def hold_compute(self, moment: torch.Event) -> None:
        """Let the current stream wait, not the host."""
        torch.accelerator.current_stream().wait_event(moment)


def _copy(target: Tensor, source: Tensor, what: str) -> None:
    try:
        target.copy_(source, non_blocking=True)
    except RuntimeError as error:
        raise CopyError(f"the copy of {what} failed: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True)
class CopyLanes:
    """A rank's lanes for copies.

    Attributes:
        d2h: The lane to the host.
        h2d: The lane from the host; the same lane where the machine copies one way at a time.
    """

    d2h: Lane
    h2d: Lane


def make_lanes(device: torch.device, count: int = 2) -> CopyLanes:
    """Make the lanes for a device.

    Args:
        device: The device of the activations.
        count: 2, or 1 for both directions in turn.
    """
    if device.type == "cpu":
        return CopyLanes(InlineLane(), InlineLane())
    d2h = StreamLane(device)
    return CopyLanes(d2h, d2h if count == 1 else StreamLane(device))

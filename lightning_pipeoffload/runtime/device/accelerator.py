"""The accelerator that this process uses, if it uses one, and lanes for copies during compute.

A lane runs its copies in order. Its ``record_event()`` returns an event that another lane, or the
compute lane, can wait for without blocking the host. On an accelerator a lane is a stream; on CPU a
copy is done when the call returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def accelerator_module() -> Any:
    """Return the module of the accelerator that torch was built for (``torch.cuda``), or None."""
    kind = torch.accelerator.current_accelerator()
    return None if kind is None else torch.get_device_module(kind)


def initialized_accelerator() -> Any:
    """Return the module of the accelerator that this process has initialized, or None.

    A run on the CPU of a machine that has an accelerator must not initialize it, which takes its
    memory and time, and fails in a forked process.
    """
    module = accelerator_module()
    if module is None:
        return None
    return module if getattr(module, "is_initialized", module.is_available)() else None


def is_on_device(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a tensor is on ``device``; a device without an index matches any index."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


class CopyError(RuntimeError):
    """A copy between device and host failed; the message names the tensor."""


class Lane:
    """The lane of a CPU: every copy is done when its call returns, so nothing ever waits.

    Subclasses copy later, or elsewhere.
    """

    def wait_for_compute(self) -> None:
        """Make later copies wait for all work queued on the compute lane."""

    def wait_for(self, event: Any) -> None:
        """Make later copies wait for an event of any lane."""

    def copy(self, target: Tensor, source: Tensor, description: str) -> None:
        """Start a copy; the caller holds both tensors until the copy is done.

        Raises:
            CopyError: The copy cannot be started; the message contains ``description``.
        """
        try:
            target.copy_(source, non_blocking=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise CopyError(f"the copy of {description} failed: {reason}") from error

    def record_event(self) -> Any:
        """Return an event that is reached when the copies started so far are done."""

    def synchronize(self, event: Any) -> None:
        """Make the host wait for an event of this lane."""

    def make_compute_wait(self, event: Any) -> None:
        """Make the compute lane wait for an event of this lane.

        Raises:
            CopyError: A copy before it has failed.
        """


class StreamLane(Lane):
    """A stream of an accelerator, whose current stream is the compute lane."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def wait_for_compute(self) -> None:
        self._stream.wait_event(torch.accelerator.current_stream().record_event())

    def wait_for(self, event: torch.Event) -> None:
        self._stream.wait_event(event)

    def copy(self, target: Tensor, source: Tensor, description: str) -> None:
        with self._stream:
            super().copy(target, source, description)

    def record_event(self) -> torch.Event:
        return self._stream.record_event()

    def synchronize(self, event: torch.Event) -> None:
        event.synchronize()

    def make_compute_wait(self, event: torch.Event) -> None:
        torch.accelerator.current_stream().wait_event(event)


@dataclass(frozen=True)
class CopyLanes:
    """Lanes to the host and back; the same lane if simultaneous copies slow each other down."""

    d2h: Lane
    h2d: Lane


def make_lanes(device: torch.device, count: int = 2) -> CopyLanes:
    """Make the lanes for a device; with ``count`` 1 both directions share one."""
    if device.type == "cpu":
        return CopyLanes(Lane(), Lane())
    d2h = StreamLane(device)
    return CopyLanes(d2h, d2h if count == 1 else StreamLane(device))

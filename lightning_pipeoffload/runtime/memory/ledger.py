"""Live saved bytes of one rank over time: on the device, on the host, and being copied.

Only the order of actions matters for a peak, as in the simulator, which predicts the same figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_pipeoffload.schedule import Action


class Held(NamedTuple):
    """Saved bytes of one stage and microbatch, or of a rank.

    Attributes:
        device: Bytes on the device, unfinished copies included.
        host: Bytes on the host, unfinished copies included.
        moving: Bytes of copies for which the compute lane has not waited yet.
    """

    device: int = 0
    host: int = 0
    moving: int = 0


_NOTHING = Held()


class Entry(NamedTuple):
    """The bytes that a rank holds after ``action``, ``seconds`` after the start of the step."""

    seconds: float
    action: Action
    held: Held


class Ledger:
    """Counts one rank's saved bytes.

    Args:
        measured: Returns the bytes of a stage and microbatch after an action that copies nothing.
    """

    def __init__(self, measured: Callable[[Action], Held]) -> None:
        self._measured = measured
        self._peak = self._total = Held()
        self._pending: list[tuple[float, Action, Held | None]] = []
        self._counted: tuple[list[Action], Any] = [], None
        self.start_step()

    def start_step(self, sizes: Any = None) -> None:
        """Clear the ledger for a new step; the peaks of earlier steps remain.

        Args:
            sizes: The inputs of ``measured`` in the last step. If its actions and sizes equal those
                of the step before, so do its peaks, and it is not counted. None: count it.
        """
        found = [action for _, action, held in self._pending if held is None]
        if sizes is None or len(found) < len(self._pending) or self._counted != (found, sizes):
            self._count()
            self._counted = found, sizes
        self._pending.clear()
        self._entries: list[Entry] = []
        self._offloaded_bytes = 0
        self._held: dict[tuple[int, int], Held] = {}
        self._total = Held()
        self._started = time.perf_counter()

    def record(self, action: Action, held: Held | None) -> None:
        """Record the bytes of an action's stage and microbatch after it; None: as measured."""
        # Summed later: between two actions code runs slowly, with cold caches.
        self._pending.append((time.perf_counter() - self._started, action, held))

    @property
    def entries(self) -> list[Entry]:
        """The entries of the last step, one for each action that can change the sums."""
        self._count()
        return self._entries

    @property
    def peak_device_bytes(self) -> int:
        """The peak on the device over all steps."""
        self._count()
        return self._peak.device

    @property
    def peak_host_bytes(self) -> int:
        """The peak on the host over all steps."""
        self._count()
        return self._peak.host

    @property
    def offloaded_bytes(self) -> int:
        """Bytes copied to the host in the last step."""
        self._count()
        return self._offloaded_bytes

    def _count(self) -> None:
        device, host, moving = self._total
        for seconds, action, stored in self._pending:
            held = self._measured(action) if stored is None else stored
            key = action.stage, action.microbatch
            before, self._held[key] = self._held.get(key, _NOTHING), held
            self._offloaded_bytes += max(held.host - before.host, 0)
            device += held.device - before.device
            host += held.host - before.host
            moving += held.moving - before.moving
            self._entries.append(Entry(seconds, action, Held(device, host, moving)))
        if self._pending:
            totals = zip(*(entry.held for entry in self._entries), strict=True)
            self._peak = Held(*map(max, self._peak, map(max, totals)))
            self._total = Held(device, host, moving)
            self._pending.clear()

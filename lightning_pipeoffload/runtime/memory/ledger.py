"""Live saved bytes of one rank over time: on the device, on the host, and on the way.

What is counted is what the stores hold, after each action of the rank. Only the order of actions
matters for a peak, as in the simulator, whose figure this is to equal.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from lightning_pipeoffload.schedule import Action


class Held(NamedTuple):
    """Saved bytes, of one stage and microbatch or of a rank.

    Attributes:
        device: Bytes on the device, copies under way included.
        host: Bytes on the host, copies under way included.
        moving: Bytes in copies that nobody has waited for.
    """

    device: int = 0
    host: int = 0
    moving: int = 0


class Entry(NamedTuple):
    """What a rank held after one action.

    Attributes:
        seconds: Seconds since the start of the step, on the host's clock.
        action: The action that had run.
        held: Bytes that the rank holds.
    """

    seconds: float
    action: Action
    held: Held


class Ledger:
    """Counts one rank's saved bytes."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._peak_device_bytes = 0
        self._peak_host_bytes = 0
        self._offloaded_bytes = 0
        self._not_counted: list[tuple[float, Action, Held]] = []
        self._held: dict[tuple[int, int], Held] = {}
        self._total = Held()

    def start_step(self) -> None:
        """Begin a new account; what was left of the steps before is gone."""
        self._count()
        self._entries = []
        self._offloaded_bytes = 0
        self._held = {}
        self._total = Held()
        self._started = time.perf_counter()

    def record(self, action: Action, held: Held) -> None:
        """Write down what the stage and microbatch of ``action`` holds after it."""
        # Counted later: between two actions each line of code is a cold one.
        self._not_counted.append((time.perf_counter() - self._started, action, held))

    @property
    def entries(self) -> list[Entry]:
        """The last step, one entry for each action that can change what is held."""
        self._count()
        return self._entries

    @property
    def peak_device_bytes(self) -> int:
        """The most on the device, of all steps."""
        self._count()
        return self._peak_device_bytes

    @property
    def peak_host_bytes(self) -> int:
        """The most on the host, of all steps."""
        self._count()
        return self._peak_host_bytes

    @property
    def offloaded_bytes(self) -> int:
        """Bytes copied to the host in the last step."""
        self._count()
        return self._offloaded_bytes

    def _count(self) -> None:
        for record in self._not_counted:
            self._count_one(*record)
        self._not_counted.clear()

    def _count_one(self, seconds: float, action: Action, held: Held) -> None:
        key = action.stage, action.microbatch
        before = self._held.get(key, _NOTHING)
        self._offloaded_bytes += max(held.host - before.host, 0)
        self._held[key] = held
        total = self._total
        self._total = Held(
            total.device + held.device - before.device,
            total.host + held.host - before.host,
            total.moving + held.moving - before.moving,
        )
        self._peak_device_bytes = max(self._peak_device_bytes, self._total.device)
        self._peak_host_bytes = max(self._peak_host_bytes, self._total.host)
        self._entries.append(Entry(seconds, action, self._total))


_NOTHING = Held()

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
        device: on the device, copies under way included.
        host: on the host, copies under way included.
        moving: in copies that nobody has waited for.
    """

    device: int = 0
    host: int = 0
    moving: int = 0


class Entry(NamedTuple):
    """What a rank held after one action.

    Attributes:
        seconds: since the start of the step, on the host's clock.
        action: what had run.
        held: by the rank.
    """

    seconds: float
    action: Action
    held: Held


class Ledger:
    """Counts one rank's saved bytes.

    Attributes:
        entries: of the last step, one for each action that can change them.
        peak_device_bytes: the most on the device, of all steps.
        peak_host_bytes: the most on the host, of all steps.
        offloaded_bytes: copied to the host in the last step.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.peak_device_bytes = 0
        self.peak_host_bytes = 0
        self.offloaded_bytes = 0
        self._held: dict[tuple[int, int], Held] = {}
        self._total = Held()

    def start_step(self) -> None:
        """Begin a new account; what the steps before left is gone."""
        self.entries = []
        self.offloaded_bytes = 0
        self._held = {}
        self._total = Held()
        self._started = time.perf_counter()

    def record(self, action: Action, held: Held) -> None:
        """Write down what the stage and microbatch of ``action`` holds after it."""
        key = action.stage, action.microbatch
        before = self._held.get(key, _NOTHING)
        self.offloaded_bytes += max(held.host - before.host, 0)
        self._held[key] = held
        total = self._total
        self._total = Held(
            total.device + held.device - before.device,
            total.host + held.host - before.host,
            total.moving + held.moving - before.moving,
        )
        self.peak_device_bytes = max(self.peak_device_bytes, self._total.device)
        self.peak_host_bytes = max(self.peak_host_bytes, self._total.host)
        self.entries.append(Entry(time.perf_counter() - self._started, action, self._total))


_NOTHING = Held()

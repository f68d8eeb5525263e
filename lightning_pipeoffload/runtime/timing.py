"""Measures how long actions and steps take, on the host's clock or on the accelerator's."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from statistics import median
from typing import Any

import torch

from lightning_pipeoffload.schedule import Action, Kind

_KEPT = 64


class HostClock:
    """Moments on the host, for devices whose work is done when the call returns."""

    def now(self) -> float:
        """Mark a moment."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds between two moments."""
        return end - start


class DeviceClock:
    """Moments in the accelerator's current stream; read only when someone asks."""

    def now(self) -> torch.Event:
        """Mark a moment."""
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        """Return the seconds between two moments; waits for the second."""
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class ActionTimer:
    """Keeps the last measurements of one rank.

    Args:
        device: whose clock to read.
    """

    def __init__(self, device: torch.device) -> None:
        self._clock: HostClock | DeviceClock
        self._clock = HostClock() if device.type == "cpu" else DeviceClock()
        self._actions: defaultdict[tuple[Kind, int], deque] = defaultdict(  # type: ignore[type-arg]
            lambda: deque(maxlen=_KEPT)
        )
        self._steps: deque = deque(maxlen=_KEPT)  # type: ignore[type-arg]

    def start(self) -> None:
        """Mark the start of an action."""
        self._spans: list[tuple[Any, Any]] = []
        self._since = self._clock.now()

    def pause(self) -> None:
        """Leave out what follows, until :meth:`resume`: the wait for another rank."""
        self._spans.append((self._since, self._clock.now()))

    def resume(self) -> None:
        """Go on measuring the action."""
        self._since = self._clock.now()

    def record(self, action: Action) -> None:
        """Mark the end of ``action``, and keep its time."""
        self.pause()
        self._actions[action.kind, action.stage].append(self._spans)

    def start_step(self) -> None:
        """Mark the start of a step."""
        self._started = self._clock.now()

    def end_step(self) -> None:
        """Mark its end."""
        self._steps.append((self._started, self._clock.now()))

    def action_seconds(self) -> dict[tuple[Kind, int], float]:
        """Return the median of each kind of action and stage."""
        return {
            key: median(sum(self._clock.seconds(*span) for span in spans) for spans in actions)
            for key, actions in self._actions.items()
        }

    def step_seconds(self) -> float:
        """Return the median time from one step's start to the next one's; 0 before a step."""
        starts = [start for start, _ in self._steps]
        between = list(zip(starts, starts[1:], strict=False))
        return self._median(between or self._steps)

    @property
    def num_steps(self) -> int:
        """Steps that were measured."""
        return len(self._steps)

    def _median(self, pairs: deque | list) -> float:  # type: ignore[type-arg]
        return median(self._clock.seconds(*pair) for pair in pairs) if pairs else 0.0

"""Measures how long actions and steps take, on the host's clock or on the accelerator's."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from lightning_pipeoffload.runtime.device.accelerator import initialized_accelerator
from lightning_pipeoffload.schedule import Action, Kind

_NUM_KEPT_STEPS = 16


def synchronized_time() -> float:
    """Synchronize with the accelerator, if this process uses one; return the host's time."""
    if initialized_accelerator():
        torch.accelerator.synchronize()
    return time.perf_counter()


class HostClock:
    """Timestamps on the host's clock, for devices that compute synchronously."""

    now = staticmethod(time.perf_counter)

    def seconds(self, start: float, end: float) -> float:
        """Return the seconds between two timestamps."""
        return end - start

    def has_passed(self, moment: float) -> bool:
        """Whether a timestamp can be read without waiting."""
        return True

    def host_time_converter(self) -> HostTimeConverter:
        """Return a converter of timestamps to the host's clock."""
        return HostTimeConverter(lambda moment: moment, 0.0)


class DeviceClock:
    """Timestamps in the accelerator's current stream, as events; reading one waits for it."""

    def now(self) -> torch.Event:
        """Record a timestamp."""
        event = torch.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.Event, end: torch.Event) -> float:
        """Return the seconds between two timestamps; waits for the second."""
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def has_passed(self, moment: torch.Event) -> bool:
        """Whether a timestamp can be read without waiting."""
        return moment.query()

    def host_time_converter(self) -> HostTimeConverter:
        """Return a converter of events to the host's clock; waits for the accelerator."""
        torch.accelerator.synchronize()  # so that the mark is not queued behind other work
        before = time.perf_counter()
        mark = self.now()
        mark.synchronize()
        after = time.perf_counter()
        middle = (before + after) / 2
        return HostTimeConverter(
            lambda moment: middle - self.seconds(moment, mark), (after - before) / 2
        )


class HostTimeConverter(NamedTuple):
    """Converts timestamps to the host's clock.

    Attributes:
        read: Returns the value of ``time.perf_counter()`` at a timestamp.
        error: The largest error of that value, in seconds.
    """

    read: Callable[[Any], float]
    error: float


@dataclass(eq=False)
class TimedStep:
    """Timestamps of one step.

    Attributes:
        actions: Each action, the spans in which it computed, and how many actions share these.
        num_slices: The slices of a microbatch that its actions count by.
    """

    start: Any
    end: Any = None
    actions: list[tuple[Action, list[tuple[Any, Any]], int]] = field(default_factory=list)
    num_slices: int = 1


class ActionTimer:
    """Measures the actions of one rank, and keeps the last steps."""

    def __init__(self, device: torch.device) -> None:
        self._clock: HostClock | DeviceClock
        self._clock = HostClock() if device.type == "cpu" else DeviceClock()
        self._now: Callable[[], Any] = self._clock.now
        self._steps: deque[TimedStep] = deque(maxlen=_NUM_KEPT_STEPS)

    def start_action(self) -> None:
        """Mark the start of an action."""
        self._spans: list[tuple[Any, Any]] = []
        self._since = self._now()

    def pause(self) -> None:
        """Exclude the time until :meth:`resume`, a wait for another rank."""
        self._spans.append((self._since, self._now()))

    def resume(self) -> None:
        """Continue to measure the action."""
        self._since = self._now()

    def end_action(self, *actions: Action) -> None:
        """Mark the end of an action, or of several of one kind and stage that ran as one."""
        self._spans.append((self._since, self._now()))
        for action in actions:
            self._step.actions.append((action, self._spans, len(actions)))

    def start_step(self, num_slices: int = 1) -> None:
        """Mark the start of a step, with so many slices of each microbatch."""
        self._step = TimedStep(self._now(), num_slices=num_slices)

    def end_step(self) -> None:
        """Mark the end of a step."""
        self._step.end = self._now()
        self._steps.append(self._step)

    def action_seconds(self) -> dict[tuple[Kind, int], float]:
        """Return the median seconds of each kind of action and stage."""
        return self.median_action_seconds(self._steps)

    def median_action_seconds(self, steps: Iterable[TimedStep]) -> dict[tuple[Kind, int], float]:
        """Return the median seconds of each kind of action and stage in some finished steps."""
        samples: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
        for step in steps:
            for action, spans, num_actions in step.actions:
                samples[action.kind, action.stage].append(self._seconds(spans) / num_actions)
        return {key: median(seconds) for key, seconds in samples.items()}

    def slice_seconds(self, num_slices: int) -> dict[tuple[Kind, int, int], float]:
        """Return the median seconds of each kind of action, stage and slice of a microbatch.

        Of steps with so many slices, if there are any: those of short sequences have fewer.
        """
        samples: defaultdict[tuple[Kind, int, int], list[float]] = defaultdict(list)
        alike = [step for step in self._steps if step.num_slices == num_slices]
        for step in alike or self._steps:
            for action, spans, num_actions in step.actions:
                key = action.kind, action.stage, action.microbatch % num_slices
                samples[key].append(self._seconds(spans) / num_actions)
        return {key: median(seconds) for key, seconds in samples.items()}

    def step_seconds(self) -> float:
        """Return the median time from one step's start to the next one's; 0 before a step."""
        return median([seconds for _, seconds in self._periods()] or [0.0])

    def idle_share(self) -> float:
        """Return the median share of a step's period in which no action ran; 0 before a step.

        Each step's actions are set against its own period, so that the share is from 0 to 1.
        """
        shares = [1 - self.busy_seconds(step) / seconds for step, seconds in self._periods()]
        return median(shares or [0.0])

    def boundary_share(self) -> float:
        """Return the median share of a step's period after its end; 0 before a step."""
        shares = [
            1 - self._clock.seconds(step.start, step.end) / seconds
            for step, seconds in self._periods()
        ]
        return median(shares or [0.0])

    @property
    def num_steps(self) -> int:
        """The number of steps kept."""
        return len(self._steps)

    @property
    def current_step(self) -> TimedStep:
        """The step started last."""
        return self._step

    def kept_steps_after(self, step: TimedStep | None) -> list[TimedStep]:
        """Return the kept steps after ``step``; all of them if it is not kept."""
        kept = [*self._steps]
        return kept[kept.index(step) + 1 :] if step in kept else kept

    def now(self) -> Any:
        """Record a timestamp on this timer's clock."""
        return self._now()

    @property
    def clock(self) -> HostClock | DeviceClock:
        """The clock that records the timestamps."""
        return self._clock

    def busy_seconds(self, step: TimedStep) -> float:
        """Return the seconds of a step in which actions ran."""
        return sum(self._seconds(spans) / shared_by for _, spans, shared_by in step.actions)

    def _periods(self) -> Iterator[tuple[TimedStep, float]]:
        """Yield each step with the seconds until the next one starts; a lone one with its own."""
        if len(self._steps) == 1:
            yield self._steps[0], self._clock.seconds(self._steps[0].start, self._steps[0].end)
        for step, following in pairwise(self._steps):
            yield step, self._clock.seconds(step.start, following.start)

    def _seconds(self, spans: list[tuple[Any, Any]]) -> float:
        return sum(self._clock.seconds(*span) for span in spans)

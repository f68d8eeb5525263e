"""The part of a timeline that a picture shows, for all of a large plan is too wide to read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_pipeoffload.schedule import Event, ScheduleError, Timeline

__all__ = ["Window", "parse_window"]


class Window(NamedTuple):
    """From when to when, in the seconds of the timeline."""

    start: float
    end: float

    @classmethod
    def of_all(cls, timelines: Sequence[Timeline]) -> Window:
        """Return what shows all of several timelines."""
        return cls(0.0, max(timeline.makespan for timeline in timelines))

    @property
    def length(self) -> float:
        """Seconds that are shown; 1 where nothing takes time."""
        return self.end - self.start or 1.0

    def shows(self, event: Event) -> bool:
        """Whether a part of an event is to be seen."""
        return event.start <= self.end and event.end >= self.start

    def clip(self, seconds: float) -> float:
        """Return the nearest time that is shown."""
        return min(max(seconds, self.start), self.end)


def parse_window(
    timelines: Sequence[Timeline], microbatches: str | None = None, time: Any = None
) -> Window:
    """Return the window that the user has asked for; all of the timelines if for none.

    Args:
        timelines: What is to be drawn.
        microbatches: "0-7": from the start of their first action to the end of their last one, in
            any of the timelines.
        time: Start and end.

    Raises:
        ScheduleError: Both are given, or one is no window of these timelines.
    """
    if microbatches is not None and time is not None:
        raise ScheduleError("picture.microbatches and picture.time exclude each other; use one")
    if microbatches is not None:
        return _around(timelines, str(microbatches))
    return Window.of_all(timelines) if time is None else _between(timelines, time)


def _around(timelines: Sequence[Timeline], microbatches: str) -> Window:
    numbers = re.fullmatch(r"(\d+)(?:-(\d+))?", microbatches.strip())
    first, last = (int(n or numbers[1]) for n in numbers.groups()) if numbers else (1, 0)
    events = [
        event
        for timeline in timelines
        for event in timeline.events
        if first <= event.action.microbatch <= last
    ]
    if not events:
        most = max(event.action.microbatch for t in timelines for event in t.events)
        raise ScheduleError(
            f"picture.microbatches ({microbatches}) must be some of the plan's, as in 0-{most}"
        )
    return Window(min(event.start for event in events), max(event.end for event in events))


def _between(timelines: Sequence[Timeline], time: Any) -> Window:
    makespan = Window.of_all(timelines).end
    is_pair = isinstance(time, Sequence) and not isinstance(time, str) and len(time) == 2
    if not is_pair or not all(isinstance(t, (int, float)) for t in time):
        raise ScheduleError(f"picture.time ({time}) must be a start and an end, as in [0,10]")
    start, end = map(float, time)
    if not 0 <= start < min(end, makespan):
        raise ScheduleError(
            f"picture.time ({time}) must start before it ends, within the {makespan:g} of the plan"
        )
    return Window(start, min(end, makespan))

"""Timelines as a file: a picture or a trace, by the ending of its name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_pipeoffload.schedule import Costs, ScheduleError, Timeline

from .figures import MISSING, has_matplotlib, save_figure
from .timelines import TimelinePanel, Window, draw_timelines
from .trace import to_trace

__all__ = ["Drawn", "PictureFile", "parse_window"]

_ENDINGS = (".svg", ".png", ".json")


class Drawn(NamedTuple):
    """One simulated timeline to draw, with the line above it."""

    timeline: Timeline
    costs: Costs
    title: str


@dataclass(frozen=True)
class PictureFile:
    """A file to draw to: ``.svg``, ``.png``, or ``.json``: a trace for Perfetto.

    Attributes:
        path: The file to write; its ending says what kind.
        microbatches: "0-7": only these; None: all.
        time: Start and end of what to show; None: all.
        unit: The unit of the time axis.

    Raises:
        ScheduleError: There is no such ending or folder, or matplotlib is missing for a picture.
    """

    path: Path
    microbatches: str | None = None
    time: Any = None
    unit: str = "s"

    def __post_init__(self) -> None:
        if self.path.suffix not in _ENDINGS:
            raise ScheduleError(f"picture ({self.path}) must end in one of {', '.join(_ENDINGS)}")
        if not self.path.parent.is_dir():
            raise ScheduleError(
                f"picture ({self.path}) cannot be written: make the folder {self.path.parent} first"
            )
        if self.path.suffix != ".json" and not has_matplotlib():
            raise ScheduleError(f"picture ({self.path}) cannot be written: {MISSING}")

    def write(self, drawn: Sequence[Drawn]) -> None:
        """Draw timelines one above the other, at one scale.

        Raises:
            ScheduleError: It cannot be written, the window is outside of the timelines, or a trace
                is wanted of several.
        """
        if self.path.suffix == ".json":
            if len(drawn) > 1:
                raise ScheduleError(
                    f"picture ({self.path}) is a trace, which shows one schedule; leave out "
                    f"compare, or draw an .svg or .png"
                )
            trace = to_trace(drawn[0].timeline, drawn[0].costs)
            with self._writing():
                self.path.write_text(json.dumps(trace), encoding="utf-8")
        else:
            window = parse_window([d.timeline for d in drawn], self.microbatches, self.time)
            figure = draw_timelines([TimelinePanel.of(*d) for d in drawn], window, self.unit)
            with self._writing():
                save_figure(figure, self.path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise ScheduleError(f"picture ({self.path}) cannot be written: {reason}") from error


def parse_window(
    timelines: Sequence[Timeline], microbatches: str | None = None, time: Any = None
) -> Window:
    """Return the window that the user has asked for; by default all of the timelines.

    Args:
        timelines: The timelines to draw.
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
    all_events = [event for timeline in timelines for event in timeline.events]
    events = [event for event in all_events if first <= event.action.microbatch <= last]
    if not events:
        most = max(event.action.microbatch for event in all_events)
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

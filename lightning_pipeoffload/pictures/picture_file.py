"""Timelines as a file: a picture or a trace, by the ending of its name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lightning_pipeoffload.schedule import Costs, ScheduleError, Timeline

from .figures import MISSING, has_matplotlib, save_figure
from .timelines import TimelinePanel, draw_timelines
from .trace import to_trace
from .window import parse_window

__all__ = ["Drawn", "PictureFile"]

_ENDINGS = (".svg", ".png", ".json")


class Drawn(NamedTuple):
    """One timeline to draw.

    Attributes:
        timeline: What ``simulate`` gave for these costs.
        costs: What it was simulated with.
        title: The line above it.
    """

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
        unit: What the axis of time is counted in.

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
            ScheduleError: It cannot be written, the part to show is none of the timelines', or a
                trace is wanted of several.
        """
        if self.path.suffix == ".json":
            self._write_trace(drawn)
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

    def _write_trace(self, drawn: Sequence[Drawn]) -> None:
        if len(drawn) > 1:
            raise ScheduleError(
                f"picture ({self.path}) is a trace, which shows one schedule; leave out compare, "
                f"or draw an .svg or .png"
            )
        trace = to_trace(drawn[0].timeline, drawn[0].costs)
        with self._writing():
            self.path.write_text(json.dumps(trace), encoding="utf-8")

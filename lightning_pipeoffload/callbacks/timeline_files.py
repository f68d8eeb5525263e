"""The files that show a measured step beside its plan."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from lightning_pipeoffload.pictures.figures import MISSING, has_matplotlib, save_figure
from lightning_pipeoffload.pictures.measured_step import MeasuredStep
from lightning_pipeoffload.pictures.timelines import draw_measured
from lightning_pipeoffload.pictures.trace import to_measured_trace
from lightning_pipeoffload.schedule import Costs, Schedule, Timeline, simulate
from lightning_pipeoffload.schedule.quantities import seconds_text, share_text

__all__ = ["TimelineFiles"]

_ENDINGS = (".svg", ".png", ".json")


class TimelineFiles:
    """Pictures, and traces for Perfetto.

    Args:
        paths: The file or files to write: ``.svg``, ``.png``, or ``.json`` for a trace.

    Raises:
        ValueError: A path ends otherwise.
    """

    def __init__(self, paths: str | PathLike[str] | Sequence[str | PathLike[str]]) -> None:
        given = [paths] if isinstance(paths, (str, PathLike)) else paths
        self.paths = [Path(path) for path in given]
        for path in self.paths:
            if path.suffix not in _ENDINGS:
                raise ValueError(
                    f"timeline ({path}) of a PipelineMonitor must end in .svg, .png or .json"
                )

    def obstacle(self) -> str:
        """Say why a file cannot be written; empty if all can."""
        return next(filter(None, map(_obstacle_of, self.paths)), "")

    def write(self, drawn: DrawnStep) -> list[str]:
        """Write all files; warn of what has become impossible, and return the others."""
        written = []
        for path in self.paths:
            try:
                drawn.write(path)
                written.append(str(path))
            except OSError as error:  # training goes on without a picture
                rank_zero_warn(f"timeline ({path}) was not written: {error.strerror or error}")
        return written


@dataclass(frozen=True)
class DrawnStep:
    """A step and its plan.

    Attributes:
        number: The number of the step.
        measured: What the ranks did when.
        error: Seconds by which times of two ranks may be apart.
        plan: The plan that they ran.
        costs: What its actions cost, in seconds and bytes.
    """

    number: int
    measured: MeasuredStep
    error: float
    plan: Schedule
    costs: Costs

    def write(self, path: Path) -> None:
        """Draw it to a file."""
        planned = simulate(self.plan, self.costs)
        if path.suffix == ".json":
            trace = to_measured_trace(self.measured, planned, self.costs)
            path.write_text(json.dumps(trace), encoding="utf-8")
            return
        save_figure(draw_measured(self.measured, planned, self.costs, self._titles(planned)), path)

    def _titles(self, planned: Timeline) -> tuple[str, str]:
        seconds, bubble = self.measured.timeline.makespan, self.measured.bubble
        return (
            f"Step {self.number} as measured: {self.plan.name}, {_describe(seconds, bubble)}; "
            f"clocks compared to ±{1e6 * self.error:.0f} µs",
            f"Its plan, with the times that actions have taken: "
            f"{_describe(planned.makespan, planned.bubble)}",
        )


def _describe(seconds: float, bubble: float) -> str:
    return f"{seconds_text(seconds)}, bubble {share_text(bubble)}; memory in MiB"


def _obstacle_of(path: Path) -> str:
    told = f"timeline ({path}) of a PipelineMonitor cannot be written: "
    if not path.parent.is_dir():
        return f"{told}make the folder {path.parent} first"
    if path.is_dir():
        return f"{told}it is a folder; name a file"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{told}permission denied; choose another folder"
    if path.suffix != ".json" and not has_matplotlib():
        return f"{told}{MISSING}, or use .json"
    return ""

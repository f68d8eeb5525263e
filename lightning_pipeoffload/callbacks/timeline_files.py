"""The files that show a measured step beside its plan."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from lightning_pipeoffload.pictures.figures import MISSING, has_matplotlib, save_figure
from lightning_pipeoffload.pictures.measured_step import MeasuredStep
from lightning_pipeoffload.pictures.timelines import draw_measured
from lightning_pipeoffload.pictures.trace import to_measured_trace
from lightning_pipeoffload.schedule import Costs, Schedule, simulate
from lightning_pipeoffload.schedule.quantities import seconds_text, share_text

__all__ = ["TimelineFiles"]

_ENDINGS = (".svg", ".png", ".json")


class TimelineFiles:
    """Pictures, and traces for Perfetto: ``.svg``, ``.png`` or ``.json`` files.

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

    def write(
        self, number: int, measured: MeasuredStep, error: float, plan: Schedule, costs: Costs
    ) -> list[str]:
        """Draw a step beside its plan; warn of files that have become impossible.

        Args:
            number: The number of the step.
            measured: The times of its actions on all ranks.
            error: Seconds by which times of two ranks may be apart.
            plan: The plan that the ranks ran.
            costs: The costs of its actions, in seconds and bytes.

        Returns:
            The files that were written.
        """
        planned = simulate(plan, costs)
        titles = (
            f"Step {number} as measured: {plan.name}, "
            f"{_describe(measured.timeline.makespan, measured.bubble)}; "
            f"clocks compared to ±{1e6 * error:.0f} µs",
            f"Its plan, with the times that actions have taken: "
            f"{_describe(planned.makespan, planned.bubble)}",
        )
        written = []
        for path in self.paths:
            try:
                if path.suffix == ".json":
                    trace = to_measured_trace(measured, planned, costs)
                    path.write_text(json.dumps(trace), encoding="utf-8")
                else:
                    save_figure(draw_measured(measured, planned, costs, titles), path)
                written.append(str(path))
            except OSError as failure:  # training goes on without a picture
                rank_zero_warn(f"timeline ({path}) was not written: {failure.strerror or failure}")
        return written


def _describe(seconds: float, bubble: float) -> str:
    return f"{seconds_text(seconds)}, bubble {share_text(bubble)}; memory in MiB"


def _obstacle_of(path: Path) -> str:
    prefix = f"timeline ({path}) of a PipelineMonitor cannot be written: "
    if not path.parent.is_dir():
        return f"{prefix}make the folder {path.parent} first"
    if path.is_dir():
        return f"{prefix}it is a folder; name a file"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"{prefix}permission denied; choose another folder"
    if path.suffix != ".json" and not has_matplotlib():
        return f"{prefix}{MISSING}, or use .json"
    return ""

"""A timeline as a file: a picture or a trace, by the ending of its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from lightning_pipeoffload.pictures.picture import picture
from lightning_pipeoffload.pictures.png import write_png
from lightning_pipeoffload.pictures.svg import to_svg
from lightning_pipeoffload.pictures.trace import to_trace
from lightning_pipeoffload.schedule import Costs, ScheduleError, Timeline

__all__ = ["check_picture", "write_picture"]


def check_picture(path: str) -> None:
    """Refuse what ``write_picture`` cannot write, before there is anything to draw.

    Args:
        path: Where a picture is to go.

    Raises:
        ScheduleError: There is no such ending or folder.
    """
    if Path(path).suffix not in WRITERS:
        raise ScheduleError(f"picture ({path}) must end in one of {', '.join(WRITERS)}")
    folder = Path(path).parent
    if not folder.is_dir():
        raise ScheduleError(f"picture ({path}) cannot be written: make the folder {folder} first")


def write_picture(path: str, timeline: Timeline, costs: Costs, title: str) -> None:
    """Write ``.svg``, ``.png``, or ``.json``: a trace for Perfetto.

    Args:
        path: Where to; the ending says what.
        timeline: What to draw.
        costs: What it was simulated with.
        title: The line above a picture.

    Raises:
        ScheduleError: There is no such ending or folder, or matplotlib is missing for a PNG.
    """
    check_picture(path)
    try:
        WRITERS[Path(path).suffix](Path(path), timeline, costs, title)
    except OSError as error:
        reason = error.strerror or error
        raise ScheduleError(f"picture ({path}) cannot be written: {reason}") from error


def _write_svg(path: Path, timeline: Timeline, costs: Costs, title: str) -> None:
    path.write_text(to_svg(picture(timeline, costs, title)), encoding="utf-8")


def _write_png(path: Path, timeline: Timeline, costs: Costs, title: str) -> None:
    write_png(picture(timeline, costs, title), path)


def _write_trace(path: Path, timeline: Timeline, costs: Costs, title: str) -> None:
    path.write_text(json.dumps(to_trace(timeline, costs)), encoding="utf-8")


WRITERS: dict[str, Callable[[Path, Timeline, Costs, str], None]] = {
    ".svg": _write_svg,
    ".png": _write_png,
    ".json": _write_trace,
}

"""Figures of matplotlib, which is an extra and imported only where a picture is drawn."""

from __future__ import annotations

import importlib.util
import os
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_pipeoffload.schedule import ScheduleError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSING = "it needs matplotlib; pip install lightning-pipeoffload[plot]"
SMALL = 8.0
"""Points of a picture's text."""
MOST_PIXELS = 2000.0
"""The widest picture."""
_DOTS_PER_INCH, _DOTS_OF_A_PNG = 100.0, 150.0


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def picture_path_error(path: Path) -> str:
    """Say why no picture, or trace, can be written to a path; "" if one can."""
    if not path.parent.is_dir():
        return f"make the folder {path.parent} first"
    if path.is_dir():
        return "it is a folder; name a file"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "permission denied; choose another folder"
    return "" if path.suffix == ".json" or has_matplotlib() else MISSING


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of the given pixels; raise an error without matplotlib."""
    if not has_matplotlib():
        raise ScheduleError(f"a picture cannot be drawn: {MISSING}")
    from matplotlib.figure import Figure  # noqa: PLC0415 - see the module's first line

    return Figure(figsize=(width / _DOTS_PER_INCH, height / _DOTS_PER_INCH), dpi=_DOTS_PER_INCH)


def save_figure(figure: Figure, path: str | PathLike[str]) -> None:
    """Write a figure as SVG or PNG, by the ending of the path; the same figure, the same bytes."""
    import matplotlib as mpl  # noqa: PLC0415 - see the module's first line

    is_svg = Path(path).suffix == ".svg"
    dots = min(_DOTS_OF_A_PNG, MOST_PIXELS / figure.get_figwidth())
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lightning-pipeoffload"}):
        figure.savefig(path, dpi=dots, metadata={"Date": None} if is_svg else None)


def lighter(color: str, share: float) -> str:
    """Mix a colour, ``#rrggbb``, with a share of white from 0 to 1."""
    parts = bytes.fromhex(color.removeprefix("#"))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)

"""A drawing as PNG, by matplotlib, which is an extra and imported only when a PNG is asked for."""

from __future__ import annotations

import importlib.util
from os import PathLike
from typing import TYPE_CHECKING

from lightning_pipeoffload.pictures.drawing import Area, Box, Drawing, Words
from lightning_pipeoffload.schedule import ScheduleError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["write_png"]

PIXELS_PER_INCH = 100
POINTS_PER_PIXEL = 72 / PIXELS_PER_INCH
ALIGNMENT = {"start": "left", "middle": "center", "end": "right"}


def write_png(drawing: Drawing, path: str | PathLike[str], sharpness: float = 1.5) -> None:
    """Write a drawing as PNG.

    Args:
        drawing: What to write.
        path: The file to write.
        sharpness: Dots of the image for a pixel of the drawing.

    Raises:
        ScheduleError: Matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ScheduleError(
            "a .png needs matplotlib; pip install lightning-pipeoffload[plot], or write a .svg"
        )
    from matplotlib.figure import Figure  # noqa: PLC0415 - see the docstring

    size = (drawing.width / PIXELS_PER_INCH, drawing.height / PIXELS_PER_INCH)
    axes = (figure := Figure(figsize=size)).add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")
    _add_boxes(axes, drawing.boxes)
    _add_areas(axes, drawing.areas)
    _add_words(axes, drawing.words)
    figure.savefig(path, dpi=sharpness * PIXELS_PER_INCH)


def _add_boxes(axes: Axes, boxes: list[Box]) -> None:
    from matplotlib.collections import PolyCollection  # noqa: PLC0415 - see the docstring

    corners = [
        [(b.x, b.y), (b.x + b.width, b.y), (b.x + b.width, b.y + b.height), (b.x, b.y + b.height)]
        for b in boxes
    ]
    axes.add_collection(PolyCollection(corners, facecolors=[box.color for box in boxes]))


def _add_areas(axes: Axes, areas: list[Area]) -> None:
    for area in areas:
        x, y = zip(*area.points, strict=True)
        axes.fill(x, y, color=area.color, linewidth=0)
        axes.plot(x, y, color=area.outline, linewidth=POINTS_PER_PIXEL)


def _add_words(axes: Axes, lines: list[Words]) -> None:
    for line in lines:
        axes.text(
            line.x,
            line.y,
            line.text,
            fontsize=line.size * POINTS_PER_PIXEL,
            color=line.color,
            horizontalalignment=ALIGNMENT[line.anchor],
            verticalalignment="center_baseline",
        )

"""What a picture is made of, whatever it is written as: boxes, lines and words on a canvas.

Lengths are pixels, from the upper left corner, and colours ``#rrggbb``. SVG and PNG are written
from the same drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "FONT_SIZE",
    "INK",
    "LINE",
    "Area",
    "Box",
    "Drawing",
    "Words",
    "ink_on",
    "lighter",
    "stack",
]

FONT_SIZE = 11.0
LINE = 20.0
"""Height of a line of text."""
INK = "#222222"
DARK_INK, LIGHT_INK = "#111111", "#ffffff"


class Box(NamedTuple):
    """A filled rectangle; ``hint`` is what an SVG viewer shows when one points at it."""

    x: float
    y: float
    width: float
    height: float
    color: str
    hint: str = ""


class Area(NamedTuple):
    """A filled polygon with an outline along all but its last edge, so many pixels thick."""

    points: tuple[tuple[float, float], ...]
    color: str
    outline: str


class Words(NamedTuple):
    """A line of text, centred in height; ``anchor`` is start, middle or end."""

    x: float
    y: float
    text: str
    size: float
    color: str
    anchor: str = "start"


@dataclass
class Drawing:
    """A canvas and what is on it; boxes are below areas, words on top."""

    width: float
    height: float
    boxes: list[Box] = field(default_factory=list)
    areas: list[Area] = field(default_factory=list)
    words: list[Words] = field(default_factory=list)

    def write(self, x: float, y: float, text: str, anchor: str = "start") -> None:
        """Write a line of text, centred in height at ``y``."""
        self.words.append(Words(x, y, text, FONT_SIZE, INK, anchor))


def stack(drawings: Sequence[Drawing]) -> Drawing:
    """Return one drawing with the others one below the other."""
    whole = Drawing(max(drawing.width for drawing in drawings), 0.0)
    for drawing in drawings:
        down = whole.height
        whole.boxes += [box._replace(y=box.y + down) for box in drawing.boxes]
        whole.areas += [_moved_down(area, down) for area in drawing.areas]
        whole.words += [words._replace(y=words.y + down) for words in drawing.words]
        whole.height += drawing.height
    return whole


def _moved_down(area: Area, down: float) -> Area:
    return area._replace(points=tuple((x, y + down) for x, y in area.points))


def lighter(color: str, share: float) -> str:
    """Mix a colour with white, of which ``share`` is from 0 to 1."""
    mixed = (round(part + (255 - part) * share) for part in _parts(color))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def ink_on(color: str) -> str:
    """Return black or white, whichever is easier to read on a colour (ITU-R BT.601 luma)."""
    red, green, blue = _parts(color)
    return DARK_INK if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else LIGHT_INK


def _parts(color: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(color.removeprefix("#"))
    return red, green, blue

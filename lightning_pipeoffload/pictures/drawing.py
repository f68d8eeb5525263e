"""What a picture is made of, whatever it is written as: boxes, lines and words on a canvas.

Lengths are pixels, from the upper left corner. SVG and PNG are written from the same drawing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Area", "Box", "Drawing", "Words"]


class Box(NamedTuple):
    """A filled rectangle; ``hint`` is what an SVG viewer shows when one points at it."""

    x: float
    y: float
    width: float
    height: float
    color: str
    hint: str = ""


class Area(NamedTuple):
    """A filled polygon with an outline along all but its last edge."""

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

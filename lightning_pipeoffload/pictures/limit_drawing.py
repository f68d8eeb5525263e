"""How long a step takes in how much memory: a staircase for each family of schedules.

Names stand at the right, as high as their lines end, and give way to each other; lines that end at
one height lie side by side. A wide band below the lines is the fastest of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor
from typing import NamedTuple

from lightning_pipeoffload.pictures.axis import TICK_COLOR, draw_time_axis, round_step
from lightning_pipeoffload.pictures.drawing import FONT_SIZE, INK, LINE, Area, Box, Drawing, Words
from lightning_pipeoffload.pictures.legend import LegendEntry, draw_legend
from lightning_pipeoffload.pictures.window import Window

__all__ = ["Stair", "Stairs", "draw_stairs"]

_LEFT, _TOP, _WIDTH, _HEIGHT, _RIGHT, _BOTTOM = 64.0, 62.0, 620.0, 400.0, 230.0, 56.0
_GRID, _BAND, _NO_FILL = "#e8eaf0", "#dfe3ee", "none"
_THICK, _BAND_WIDTH, _MARK = 2.0, 9.0, 7.0
_LEADER, _SWATCH, _TICKS = 40.0, 11.0, 8
_MOST_TIMES_THE_FASTEST = 1.5
_BESIDE = 2.5  # pixels from a line to one that would hide it
_LEGEND = (LegendEntry((_BAND,), "the fastest of all"),)


class Stair(NamedTuple):
    """From this memory on a step takes so long; ``hint`` says which plan does."""

    memory: float
    seconds: float
    hint: str = ""


@dataclass(frozen=True)
class Stairs:
    """What families need.

    Attributes:
        name: Their names.
        color: Of their line.
        stairs: Each with more memory and less time than the one before.
    """

    name: str
    color: str
    stairs: Sequence[Stair]


@dataclass(frozen=True)
class _Plot:
    """Scales from memory and seconds to pixels."""

    most_memory: float
    fastest: float
    slowest: float

    @property
    def lowest(self) -> float:
        """The seconds at the lower edge."""
        return max(0.0, self.fastest - 0.06 * (self.slowest - self.fastest))

    def x(self, memory: float) -> float:
        return _LEFT + min(memory / self.most_memory, 1.0) * _WIDTH

    def y(self, seconds: float) -> float:
        share = (seconds - self.lowest) / (self.slowest - self.lowest)
        return _TOP + (1 - min(share, 1.0)) * _HEIGHT

    def line(self, stairs: Iterable[Stair], aside: float = 0.0) -> tuple[tuple[float, float], ...]:
        """Return the corners, moved aside; what is above the upper edge comes down from there."""
        corners: list[tuple[float, float]] = []
        for stair in stairs:
            x, y = self.x(stair.memory), self.y(stair.seconds)
            is_first = not corners
            corners += [] if is_first else [(x, corners[-1][1])]
            if not is_first and corners[-1][1] <= _TOP:
                corners = [(x, _TOP)]
            corners.append((x, y))
        moved = [(x + aside, y - aside) for x, y in corners]
        return (*moved, (_LEFT + _WIDTH, moved[-1][1]))


def draw_stairs(
    families: Sequence[Stairs],
    most_memory: float,
    ideal: float,
    title: str,
    units: tuple[str, str],
) -> Drawing:
    """Draw step time over the memory limit.

    Args:
        families: What to draw; each has a stair within the memory.
        most_memory: The largest limit that is shown.
        ideal: Seconds of a step without any bubble.
        title: The line above.
        units: What time and memory are counted in.
    """
    every = [stair for family in families for stair in family.stairs]
    slowest, fastest = max(s.seconds for s in every), min(s.seconds for s in every)
    shown = min(slowest, _MOST_TIMES_THE_FASTEST * fastest)
    plot = _Plot(most_memory, min(ideal, fastest), shown * 1.02 or 1.0)  # where nothing takes time
    drawing = Drawing(_LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT + _BOTTOM)
    drawing.write(14, 20, title)
    draw_legend(drawing, _LEFT + _WIDTH - _LEGEND[0].width, 34, [_LEGEND])
    _draw_axes(drawing, plot, units)
    _draw_ideal(drawing, plot, ideal)
    _draw_band(drawing, plot.line(_fastest_of(every)))
    ordered = sorted(families, key=lambda one: (-one.stairs[-1].seconds, one.stairs[0].memory))
    asides = _asides([plot.y(family.stairs[-1].seconds) for family in ordered])
    for family, aside in zip(ordered, asides, strict=True):
        line = plot.line(family.stairs, aside)
        drawing.areas.append(Area(line, _NO_FILL, family.color, _THICK))
        _draw_marks(drawing, plot, family, aside)
    ends = [plot.y(one.stairs[-1].seconds) - x for one, x in zip(ordered, asides, strict=True)]
    _draw_names(drawing, ordered, ends)
    return drawing


def _asides(heights: Sequence[float]) -> list[float]:
    """Return how far each line gives way to others of about its height, the first one up."""
    alike = [[n for n, y in enumerate(heights) if abs(y - own) < 1] for own in heights]
    return [
        _BESIDE * ((len(others) - 1) / 2 - others.index(number))
        for number, others in enumerate(alike)
    ]


def _fastest_of(stairs: Iterable[Stair]) -> list[Stair]:
    found: list[Stair] = []
    for stair in sorted(stairs):
        if not found or stair.seconds < found[-1].seconds:
            found.append(stair)
    return found


def _draw_band(drawing: Drawing, corners: Sequence[tuple[float, float]]) -> None:
    """Draw a wide line of boxes, which are below the marks of plans."""
    for (left, start), (right, end) in pairwise(corners):
        corner = left - _BAND_WIDTH / 2, min(start, end) - _BAND_WIDTH / 2
        size = right - left + _BAND_WIDTH, abs(end - start) + _BAND_WIDTH
        drawing.boxes.append(Box(*corner, *size, _BAND))


def _draw_axes(drawing: Drawing, plot: _Plot, units: tuple[str, str]) -> None:
    time, memory = units
    drawing.write(14, 44, f"step time ({time})")
    step = round_step((plot.slowest - plot.lowest) / _TICKS)
    for tick in range(ceil(plot.lowest / step), floor(plot.slowest / step) + 1):
        y = plot.y(tick * step)
        drawing.boxes.append(Box(_LEFT, y, _WIDTH, 1, _GRID))
        drawing.write(_LEFT - 8, y, f"{tick * step:g}", "end")
    bottom = _TOP + _HEIGHT
    drawing.boxes.append(Box(_LEFT, bottom, _WIDTH, 1, TICK_COLOR))
    draw_time_axis(drawing, bottom, Window(0.0, plot.most_memory), plot.x, "")
    drawing.write(_LEFT + _WIDTH / 2, bottom + 36, f"memory limit ({memory})", "middle")


def _draw_ideal(drawing: Drawing, plot: _Plot, ideal: float) -> None:
    """Draw a line of dashes where a step without a bubble would be, its name below."""
    y, dash = plot.y(ideal), 5.0
    for number in range(int(_WIDTH / (2 * dash))):
        drawing.boxes.append(Box(_LEFT + 2 * dash * number, y, dash, 1, TICK_COLOR))
    words = Words(_LEFT + 6, y + 10, f"no bubble: {ideal:.4g}", FONT_SIZE, TICK_COLOR)
    drawing.words.append(words)


def _draw_marks(drawing: Drawing, plot: _Plot, family: Stairs, aside: float) -> None:
    half = _MARK / 2
    for stair in family.stairs:
        if stair.seconds <= plot.slowest:
            x, y = plot.x(stair.memory) + aside, plot.y(stair.seconds) - aside
            drawing.boxes.append(Box(x - half, y - half, _MARK, _MARK, family.color, stair.hint))


def _draw_names(drawing: Drawing, ordered: Sequence[Stairs], ends: Sequence[float]) -> None:
    right = _LEFT + _WIDTH
    for family, end, y in zip(
        ordered, ends, _spread(ends, _TOP + _HEIGHT + _BOTTOM - LINE), strict=True
    ):
        leader = ((right, end), (right + 6, end), (right + _LEADER - 4, y))
        drawing.areas.append(Area(leader, _NO_FILL, family.color))
        corner = right + _LEADER, y - _SWATCH / 2
        drawing.boxes.append(Box(*corner, _SWATCH, _SWATCH, family.color))
        name = f"{family.name}  {family.stairs[-1].seconds:.4g}"
        drawing.words.append(Words(corner[0] + _SWATCH + 5, y, name, FONT_SIZE, INK))


def _spread(heights: Sequence[float], bottom: float, distance: float = LINE - 4) -> list[float]:
    """Return rising heights that are not too close, as near as may be to those that are given."""

    def pushed(places: Iterable[float], limit: Callable[[float, float], float]) -> list[float]:
        found: list[float] = []
        for place in places:
            found.append(limit(place, found[-1]) if found else place)
        return found

    down = pushed(heights, lambda place, last: max(place, last + distance))
    down[-1] = min(down[-1], bottom)
    return pushed(down[::-1], lambda place, last: min(place, last - distance))[::-1]

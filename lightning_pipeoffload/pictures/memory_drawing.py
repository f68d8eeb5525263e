"""A rank's saved bytes over a step, as planned and as measured, one above the other.

Both are at one scale of time and of bytes, so that what differs is seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor

from lightning_pipeoffload.pictures.drawing import Area, Box, Drawing, Words
from lightning_pipeoffload.pictures.picture import round_step
from lightning_pipeoffload.schedule import Costs, Timeline
from lightning_pipeoffload.schedule.simulation.memory_curve import (
    Curve,
    host_memory_curves,
    memory_curves,
)

__all__ = ["MemoryPanel", "draw_memory", "planned_panels"]

_LEFT, _RIGHT, _TOP, _WIDTH = 120.0, 150.0, 70.0, 820.0
_PANEL, _GAP, _RANK_GAP, _FONT_SIZE = 56.0, 6.0, 16.0, 11.0
_TICK_DISTANCE = 90.0
_INK, _BACKGROUND, _NO_FILL = "#222222", "#f4f4f4", "none"
_DEVICE, _DEVICE_OUTLINE = "#d8dce6", "#5c6784"
_HOST_OUTLINE, _MOVING_OUTLINE = "#8e5bb5", "#d9822b"


@dataclass(frozen=True)
class MemoryPanel:
    """What one rank keeps over a step.

    Attributes:
        name: "plan" or "measured".
        device: Seconds, and the bytes on the device from then on.
        host: The same on the host.
        moving: The same of copies that nobody has waited for; empty where it is not known.
        end: Seconds of the step.
    """

    name: str
    device: Curve
    host: Curve
    moving: Curve
    end: float

    @property
    def highest(self) -> float:
        """The most bytes of any curve."""
        return max(_peak(curve) for curve in (self.device, self.host, self.moving))


def planned_panels(timeline: Timeline, costs: Costs) -> list[MemoryPanel]:
    """Return what a plan promises for each rank.

    Args:
        timeline: What ``simulate`` gave for these costs.
        costs: Costs in seconds and bytes.
    """
    on_device, on_host = memory_curves(timeline, costs), host_memory_curves(timeline, costs)
    return [
        MemoryPanel("plan", device, host, [], timeline.makespan)
        for device, host in zip(on_device, on_host, strict=True)
    ]


def draw_memory(ranks: Sequence[Sequence[MemoryPanel]], title: str) -> Drawing:
    """Draw the panels of each rank, one below the other.

    Args:
        ranks: The panels of each rank.
        title: The line above.
    """
    count, panels = len(ranks), [panel for rank in ranks for panel in rank]
    height = _TOP + len(panels) * (_PANEL + _GAP) + count * _RANK_GAP + 30
    drawing = Drawing(_LEFT + _WIDTH + _RIGHT, height)
    drawing.words.append(Words(14, 20, title, _FONT_SIZE, _INK))
    _draw_legend(drawing)
    seconds = max((panel.end for panel in panels), default=0.0) or 1.0
    highest = max((panel.highest for panel in panels), default=0.0) or 1.0
    top = _TOP
    for number, rank in enumerate(ranks):
        for panel in rank:
            name = Words(_LEFT - 8, top + _PANEL / 2, f"rank {number} {panel.name}", *_small("end"))
            drawing.words.append(name)
            _Frame(drawing, top, _WIDTH / seconds, (_PANEL - 2) / highest).draw(panel)
            top += _PANEL + _GAP
        top += _RANK_GAP
    _draw_time_axis(drawing, top - _RANK_GAP, seconds)
    return drawing


@dataclass(frozen=True)
class _Frame:
    """Where a panel is, and its scales in pixels per second and per byte."""

    drawing: Drawing
    top: float
    per_second: float
    per_byte: float

    def draw(self, panel: MemoryPanel) -> None:
        width = panel.end * self.per_second
        self.drawing.boxes.append(Box(_LEFT, self.top, width, _PANEL, _BACKGROUND))
        curves = (panel.device, panel.moving, panel.host)
        colors = (
            (_DEVICE, _DEVICE_OUTLINE),
            (_NO_FILL, _MOVING_OUTLINE),
            (_NO_FILL, _HOST_OUTLINE),
        )
        for curve, (color, outline) in zip(curves, colors, strict=True):
            if _peak(curve):
                points = tuple(self._points(curve, panel.end))
                self.drawing.areas.append(Area(points, color, outline))
        for place, (what, curve) in enumerate((("device", panel.device), ("host", panel.host))):
            text = f"{what} peak {_peak(curve) / 2**20:.2f} MiB"
            y = self.top + _PANEL / 2 + 14 * (place - 0.5)
            self.drawing.words.append(Words(_LEFT + width + 8, y, text, *_small("start")))

    def _points(self, curve: Curve, end: float) -> Iterator[tuple[float, float]]:
        bottom, ends = self.top + _PANEL, [time for time, _ in curve[1:]] + [end]
        yield _LEFT, bottom
        for (start, memory), stop in zip(curve, ends, strict=True):
            for time in (start, stop):
                yield _LEFT + time * self.per_second, bottom - memory * self.per_byte
        yield _LEFT + end * self.per_second, bottom


def _draw_legend(drawing: Drawing) -> None:
    x, y = 14.0, 44.0
    entries = (
        ("on the device", _DEVICE),
        ("on the host", _HOST_OUTLINE),
        ("on the way (not waited for yet)", _MOVING_OUTLINE),
    )
    for text, color in entries:
        drawing.boxes.append(Box(x, y - 6, 13, 13, color))
        drawing.words.append(Words(x + 18, y, text, *_small("start")))
        x += 40 + 6 * len(text)


def _draw_time_axis(drawing: Drawing, top: float, seconds: float) -> None:
    step = round_step(_TICK_DISTANCE * seconds / _WIDTH)
    for tick in range(floor(seconds / step + 1e-9) + 1):
        x = _LEFT + tick * step * _WIDTH / seconds
        drawing.boxes.append(Box(x, top, 1, 4, _INK))
        label = f"{tick * step * 1e3:g}" if tick else "0 ms"
        drawing.words.append(Words(x, top + 14, label, *_small("middle")))


def _small(anchor: str) -> tuple[float, str, str]:
    return _FONT_SIZE, _INK, anchor


def _peak(curve: Curve) -> float:
    return max((memory for _, memory in curve), default=0.0)

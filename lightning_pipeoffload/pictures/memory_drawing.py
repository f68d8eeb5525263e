"""A rank's saved bytes over a step, as planned and as measured, one above the other.

Both are at one scale of time and of bytes, so that what differs is seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_pipeoffload.pictures.axis import draw_time_axis
from lightning_pipeoffload.pictures.drawing import Area, Box, Drawing
from lightning_pipeoffload.pictures.legend import LegendEntry, draw_legend
from lightning_pipeoffload.pictures.window import Window
from lightning_pipeoffload.schedule import Costs, Timeline
from lightning_pipeoffload.schedule.mebibytes import mebibytes
from lightning_pipeoffload.schedule.simulation.memory_curve import (
    Curve,
    host_memory_curves,
    memory_curves,
)

__all__ = ["MemoryPanel", "draw_memory", "planned_panels"]

_LEFT, _RIGHT, _TOP, _WIDTH = 120.0, 150.0, 70.0, 820.0
_PANEL, _GAP, _RANK_GAP = 56.0, 6.0, 16.0
_BACKGROUND, _NO_FILL = "#f4f4f4", "none"
_DEVICE, _DEVICE_OUTLINE = "#d8dce6", "#5c6784"
_HOST_OUTLINE, _MOVING_OUTLINE = "#8e5bb5", "#d9822b"
_LEGEND = (
    LegendEntry((_DEVICE,), "on the device"),
    LegendEntry((_HOST_OUTLINE,), "on the host"),
    LegendEntry((_MOVING_OUTLINE,), "on the way (not waited for yet)"),
)


@dataclass(frozen=True)
class MemoryPanel:
    """What one rank keeps over a step.

    Attributes:
        name: "plan" or "measured".
        device: Seconds, and the bytes on the device from then on.
        host: The same on the host.
        moving: The same for copies that nobody has waited for; empty where it is not known.
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
    drawing.write(14, 20, title)
    draw_legend(drawing, 14, 34, [_LEGEND])
    seconds = max((panel.end for panel in panels), default=0.0) or 1.0
    highest = max((panel.highest for panel in panels), default=0.0) or 1.0
    top = _TOP
    for number, rank in enumerate(ranks):
        for panel in rank:
            drawing.write(_LEFT - 8, top + _PANEL / 2, f"rank {number} {panel.name}", "end")
            _Frame(drawing, top, _WIDTH / seconds, (_PANEL - 2) / highest).draw(panel)
            top += _PANEL + _GAP
        top += _RANK_GAP

    def x_of(milliseconds: float) -> float:
        return _LEFT + milliseconds * _WIDTH / (1e3 * seconds)

    draw_time_axis(drawing, top - _RANK_GAP, Window(0.0, 1e3 * seconds), x_of, "ms")
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
            text = f"{what} peak {mebibytes(_peak(curve))}"
            y = self.top + _PANEL / 2 + 14 * (place - 0.5)
            self.drawing.write(_LEFT + width + 8, y, text)

    def _points(self, curve: Curve, end: float) -> Iterator[tuple[float, float]]:
        bottom, ends = self.top + _PANEL, [time for time, _ in curve[1:]] + [end]
        yield _LEFT, bottom
        for (start, memory), stop in zip(curve, ends, strict=True):
            for time in (start, stop):
                yield _LEFT + time * self.per_second, bottom - memory * self.per_byte
        yield _LEFT + end * self.per_second, bottom


def _peak(curve: Curve) -> float:
    return max((memory for _, memory in curve), default=0.0)

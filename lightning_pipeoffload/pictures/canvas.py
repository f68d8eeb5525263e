"""Where things are on a picture of a timeline: pixels of a second, a rank, a lane and a curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pipeoffload.pictures.drawing import LINE, Drawing
from lightning_pipeoffload.pictures.legend import LegendEntry, arrange, entries_for
from lightning_pipeoffload.pictures.window import Window
from lightning_pipeoffload.schedule.timeline import COMPUTE_LANE, Timeline

__all__ = ["CURVE", "LEFT", "MARGIN", "ROW", "Canvas", "Look"]

MARGIN, LEFT, RIGHT = 14.0, 70.0, 76.0
ROW, LANE, CURVE, GAP = 22.0, 8.0, 18.0, 8.0
CELL_WIDTH, MIN_WIDTH, MAX_WIDTH = 18.0, 560.0, 4000.0


@dataclass(frozen=True)
class Look:
    """What pictures that stand one above the other have in common.

    Attributes:
        window: What is shown.
        scale: Pixels per second.
        highest: The memory that the tallest curve stands for; None: the picture's own.
        unit: What the axis of time is counted in.
        explained: What the legend explains beside the colours of actions.
    """

    window: Window
    scale: float
    highest: float | None = None
    unit: str = "s"
    explained: tuple[LegendEntry, ...] = ()

    @classmethod
    def of(
        cls,
        timelines: Sequence[Timeline],
        window: Window | None = None,
        highest: float | None = None,
        unit: str = "s",
    ) -> Look:
        """Return a look in which the numbers of most cells have room."""
        window = window or Window.of_all(timelines)
        short = min(map(_short_action, timelines))
        return cls(window, min(CELL_WIDTH / short, MAX_WIDTH / window.length), highest, unit)


@dataclass
class Canvas:
    """A drawing of a timeline, and the measures of it.

    Attributes:
        drawing: What is drawn so far.
        timeline: The timeline that is drawn.
        look: How it is drawn.
        narrow_lanes: The lanes under the row of each rank.
        chunks: For every stage its chunk, and how many chunks its rank has.
        legend: What explains the colours, line by line.
    """

    drawing: Drawing
    timeline: Timeline
    look: Look
    narrow_lanes: list[str]
    chunks: dict[int, tuple[int, int]]
    legend: list[list[LegendEntry]]

    @classmethod
    def of(cls, timeline: Timeline, look: Look | None = None) -> Canvas:
        """Return an empty canvas."""
        look = look or Look.of([timeline])
        narrow_lanes = sorted({event.lane for event in timeline.events} - {COMPUTE_LANE})
        width = max(MIN_WIDTH, LEFT + look.window.length * look.scale + RIGHT)
        chunks = _chunks(timeline)
        # FREE takes no time: it has no cell, so its colour would explain nothing.
        kinds = {event.action.kind for event in timeline.events if event.end > event.start}
        entries = entries_for(kinds, max((count for _, count in chunks.values()), default=1))
        legend = arrange([*entries, *look.explained], width - LEFT - MARGIN)
        canvas = cls(Drawing(width, 0.0), timeline, look, narrow_lanes, chunks, legend)
        canvas.drawing.height = canvas.top(timeline.num_ranks) + LINE + MARGIN
        return canvas

    def x(self, seconds: float) -> float:
        """Return the place of a time; of one outside of the window its edge."""
        window = self.look.window
        return LEFT + (window.clip(seconds) - window.start) * self.look.scale

    def top(self, rank: int) -> float:
        """Return the upper edge of a rank; that of the rank after the last is the time axis."""
        height = ROW + len(self.narrow_lanes) * LANE + CURVE + GAP
        return MARGIN + (1 + len(self.legend)) * LINE + GAP + rank * height

    def lane(self, rank: int, lane: str) -> tuple[float, float]:
        """Return the upper edge and the height of a lane."""
        if lane == COMPUTE_LANE:
            return self.top(rank), ROW
        return self.top(rank) + ROW + self.narrow_lanes.index(lane) * LANE, LANE

    def curve_bottom(self, rank: int) -> float:
        """Return the zero line of a rank's memory curve."""
        return self.top(rank) + ROW + len(self.narrow_lanes) * LANE + CURVE


def _short_action(timeline: Timeline) -> float:
    """Return the seconds of a short action; a few that are shorter still are no scale."""
    seconds = sorted(event.end - event.start for event in timeline.events)
    positive = [duration for duration in seconds if duration > 0]
    return positive[len(positive) // 4] if positive else 1.0


def _chunks(timeline: Timeline) -> dict[int, tuple[int, int]]:
    held = sorted({(event.rank, event.action.stage) for event in timeline.events})
    stages = [[s for owner, s in held if owner == rank] for rank in range(timeline.num_ranks)]
    return {s: (chunk, len(own)) for own in stages for chunk, s in enumerate(own)}

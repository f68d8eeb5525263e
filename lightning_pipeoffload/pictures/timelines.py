"""Timelines as the papers draw them: a row per rank, a cell per action, its microbatch inside.

Colours tell F, B, W and BW apart, shades the chunks of a rank. Under a rank's row are the lanes of
its copies and reductions, where there are any, and the curve of its memory, at one scale for all.
A step that was measured stands above the plan that it ran by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_pipeoffload.schedule import COMPUTE_LANE, Costs, Event, Kind, Timeline
from lightning_pipeoffload.schedule.simulation import Curve, memory_curves

from .figures import MOST_PIXELS, SMALL, lighter, new_figure
from .measured_step import MeasuredStep, Wait

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {
    Kind.F: ("#2f6fc4", "F: forward"),
    Kind.B: ("#1497ad", "B: gradient of the input"),
    Kind.W: ("#5d9e1f", "W: gradient of the weights"),
    Kind.BW: ("#d9822b", "BW: both gradients"),
    Kind.REDUCE: ("#e0b416", "gradients over the replicas"),
    Kind.STEP: ("#9c7a1c", "the optimizer on the host"),
    Kind.OFFLOAD: ("#8e5bb5", "activations go to the host"),
    Kind.OFFLOAD_W: ("#6b4aa8", "what waits for W goes to the host"),
    Kind.RELOAD: ("#c2557f", "activations come back"),
    Kind.RELOAD_B: ("#d6455d", "what B needs comes back"),
    Kind.RELOAD_W: ("#a03c4a", "what W needs comes back"),
}
_IDLE, _WAIT, _MEMORY, _OUTLINE = "#f0f0f0", "#f2b8b0", "#d8dce6", "#5c6784"
_LIGHTEST = 0.7
# Pixels.
_LEFT, _RIGHT, _TITLE, _AXIS, _LEGEND_LINE = 70.0, 80.0, 26.0, 34.0, 20.0
_TITLE_LINE, _CHARACTER = 15.0, 7.4  # of titles
_ROW = 22.0
_CELL, _NARROWEST, _LEGEND_COLUMN = 18.0, 560.0, 215.0
_WIDEST = MOST_PIXELS - _LEFT - _RIGHT
_DIGIT, _LEAST_DIGIT = 7.0, 4.0
_LANES = {"d2h": "to host", "h2d": "from host"}
# Of a row: a lane, a curve, and what is free below a rank.
_LANE, _CURVE, _GAP = 0.45, 0.8, 0.35


class Window(NamedTuple):
    """The time that a picture shows, in the seconds of the timeline."""

    start: float
    end: float
    microbatches: tuple[int, int] | None = None  # the first and the last of them; None: all

    @classmethod
    def of_all(cls, timelines: Sequence[Timeline]) -> Window:
        return cls(0.0, max(timeline.makespan for timeline in timelines))

    @property
    def length(self) -> float:
        """Seconds that are shown; 1 where nothing takes time."""
        return self.end - self.start or 1.0

    def shows(self, event: Event, num_slices: int) -> bool:
        if self.microbatches is not None:
            first, last = self.microbatches
            return first <= event.action.microbatch // num_slices <= last
        return event.start <= self.end and event.end >= self.start


@dataclass(frozen=True)
class TimelinePanel:
    """One timeline of a picture, simulated or measured.

    Attributes:
        timeline: The timeline.
        curves: The memory curve of each rank.
        title: The line above it.
        beginnings: Actions up to their wait for a message.
        waits: The waits for messages.
    """

    timeline: Timeline
    curves: Sequence[Curve]
    title: str = ""
    beginnings: Sequence[Event] = ()
    waits: Sequence[Wait] = ()

    @classmethod
    def of(cls, timeline: Timeline, costs: Costs, title: str = "") -> TimelinePanel:
        return cls(timeline, memory_curves(timeline, costs), title)

    @cached_property
    def lanes(self) -> list[list[str]]:
        """The lanes under the row of each rank: those on which something takes time."""
        used = {(e.rank, e.lane) for e in self.timeline.events if e.end > e.start}
        lanes = sorted({lane for _, lane in used} - {COMPUTE_LANE})
        ranks = range(self.timeline.num_ranks)
        return [[lane for lane in lanes if (rank, lane) in used] for rank in ranks]

    @cached_property
    def tops(self) -> list[float]:
        """The number of rows above each rank, by its lanes and its curve; last, of all rows."""
        heights = (1 + _LANE * len(lanes) + _CURVE + _GAP for lanes in self.lanes)
        return [*accumulate(heights, initial=0.0)]

    @property
    def height(self) -> float:
        """Pixels of the axes."""
        return _ROW * self.tops[-1]

    def chunks(self) -> dict[int, tuple[int, int]]:
        """Return for every stage its chunk, and how many chunks its rank has."""
        held = sorted({(event.rank, event.action.stage) for event in self.timeline.events})
        ranks = range(self.timeline.num_ranks)
        stages = [[s for owner, s in held if owner == rank] for rank in ranks]
        return {s: (chunk, len(of_rank)) for of_rank in stages for chunk, s in enumerate(of_rank)}


def draw_timelines(
    panels: Sequence[TimelinePanel], window: Window | None = None, unit: str = "s"
) -> Figure:
    """Draw timelines one above the other, at one scale of time and of memory.

    The width follows from the number of actions, up to 2,000 pixels with its margins; numbers
    that do not fit their cells are left out.

    Args:
        panels: The timelines.
        window: The time to show; None: all.
        unit: The unit of the time axis.

    Raises:
        ScheduleError: Matplotlib is not installed.
    """
    window = window or Window.of_all([panel.timeline for panel in panels])
    short = min(_short_action(panel.timeline) for panel in panels)
    scale = min(_CELL / short, _WIDEST / window.length)
    width = max(_NARROWEST, window.length * scale)
    columns = max(1, int((width + _LEFT) // _LEGEND_COLUMN))
    entries = _legend_entries(panels)
    legend = _LEGEND_LINE * (-(-len(entries) // columns)) + 12
    in_line = int((width + _RIGHT) / _CHARACTER)
    titles = [wrap(panel.title, in_line) or [""] for panel in panels]
    heads = [_TITLE + _TITLE_LINE * (len(title) - 1) for title in titles]
    tops = [panel.height + head + _AXIS for panel, head in zip(panels, heads, strict=True)]
    height = sum(tops) + legend
    figure = new_figure(_LEFT + width + _RIGHT, height)
    highest = max((m for p in panels for curve in p.curves for _, m in curve), default=0.0) or 1.0
    top = height
    for panel, title, head, used in zip(panels, titles, heads, tops, strict=True):
        bounds = (
            _LEFT / (_LEFT + width + _RIGHT),
            (top - head - panel.height) / height,
            width / (_LEFT + width + _RIGHT),
            panel.height / height,
        )
        axes = figure.add_axes(bounds)
        axes.set_title("\n".join(title), loc="left", fontsize=1.2 * SMALL)
        _Panel(axes, panel, window, width / window.length, highest).draw(unit)
        top -= used
    _draw_legend(figure, entries, columns)
    return figure


def draw_measured(
    measured: MeasuredStep, planned: Timeline, costs: Costs, titles: tuple[str, str]
) -> Figure:
    """Draw a measured step and, below it, its plan, in milliseconds.

    ``titles`` are the lines above the two; ``planned`` is simulated for costs in seconds and bytes.
    """
    above = TimelinePanel(
        _in_milliseconds(measured.timeline),
        _in_mebibytes(measured.curves),
        titles[0],
        [_seconds_to_ms(event) for event in measured.beginnings],
        [_seconds_to_ms(wait) for wait in measured.waits],
    )
    curves = _in_mebibytes(memory_curves(planned, costs))
    below = TimelinePanel(_in_milliseconds(planned), curves, titles[1])
    return draw_timelines([above, below], unit="ms")


class _Panel:
    """Draws one timeline; the axes count time, and rows from the top."""

    def __init__(
        self, axes: Axes, panel: TimelinePanel, window: Window, scale: float, highest: float
    ) -> None:
        self._axes, self._panel, self._window = axes, panel, window
        self._scale = scale  # pixels of a second
        self._highest = highest
        self._chunks = panel.chunks()

    def draw(self, unit: str) -> None:
        axes, panel, window = self._axes, self._panel, self._window
        num_ranks, end = panel.timeline.num_ranks, panel.timeline.makespan
        axes.set(xlim=(window.start, window.start + window.length))
        axes.set(ylim=(panel.tops[-1], 0))
        for rank in range(num_ranks):
            axes.broken_barh([(0, end)], (self._top(rank), 0.95), facecolor=_IDLE)
        self._draw_events()
        for rank, curve in enumerate(panel.curves):
            self._draw_memory(rank, curve, end)
        self._name_rows(num_ranks)
        axes.set_xlabel(unit, fontsize=SMALL, loc="left", labelpad=1)
        axes.tick_params(axis="x", labelsize=SMALL)
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)

    def _top(self, rank: int) -> float:
        return self._panel.tops[rank]

    def _lane(self, rank: int, lane: str) -> tuple[float, float]:
        """Return the upper edge and the height of a lane, in rows."""
        if lane == COMPUTE_LANE:
            return self._top(rank), 0.95
        return self._top(rank) + 1 + _LANE * self._panel.lanes[rank].index(lane), 0.9 * _LANE

    def _draw_events(self) -> None:
        bars: dict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
        for event in (*self._panel.beginnings, *self._panel.timeline.events):
            if event.end > event.start and self._shows(event):
                color = _color(event.action.kind, self._chunks[event.action.stage])
                bars[event.rank, event.lane, color].append((event.start, event.end - event.start))
        for wait in self._panel.waits:
            bars[wait.rank, COMPUTE_LANE, _WAIT].append((wait.start, wait.end - wait.start))
        for (rank, lane, color), spans in bars.items():
            self._axes.broken_barh(
                spans, self._lane(rank, lane), facecolor=color, edgecolor="white", linewidth=0.4
            )
        for event in filter(self._shows, self._panel.timeline.events):
            if event.lane == COMPUTE_LANE:
                self._label(event)

    def _shows(self, event: Event) -> bool:
        return self._window.shows(event, self._panel.timeline.num_sequence_slices)

    def _label(self, event: Event) -> None:
        text = self._panel.timeline.microbatch_label(event.action)
        size = min(_DIGIT, (event.end - event.start) * self._scale / (0.9 * len(text)))
        if size >= _LEAST_DIGIT:
            number, count = self._chunks[event.action.stage]
            ink = "white" if 2 * number < count else "black"  # later chunks are lighter
            middle = (event.start + event.end) / 2, self._top(event.rank) + 0.5
            self._axes.text(
                *middle, text, fontsize=size, color=ink, ha="center", va="center", clip_on=True
            )

    def _draw_memory(self, rank: int, curve: Curve, end: float) -> None:
        bottom = self._top(rank + 1) - _GAP
        times = [*(time for time, _ in curve), end]
        heights = [_CURVE * memory / self._highest for _, memory in curve]
        levels = [bottom - height for height in (*heights, heights[-1])]
        self._axes.fill_between(
            times, levels, bottom, step="post", facecolor=_MEMORY, edgecolor=_OUTLINE, linewidth=0.6
        )
        peak = max(memory for _, memory in curve)
        self._axes.annotate(
            f"peak {peak:.4g}",
            (min(end, self._window.end), bottom - _CURVE / 2),
            xytext=(5, 0),
            textcoords="offset points",
            fontsize=SMALL,
            va="center",
            annotation_clip=False,
        )

    def _name_rows(self, num_ranks: int) -> None:
        ranks = range(num_ranks)
        lanes = [(rank, lane) for rank in ranks for lane in self._panel.lanes[rank]]
        rows = [self._top(rank) + 0.5 for rank in ranks]
        self._axes.set_yticks(rows, [f"rank {rank}" for rank in ranks], fontsize=SMALL)
        rows = [sum(self._lane(rank, lane)) - _LANE / 2 for rank, lane in lanes]
        names = [_LANES.get(lane, lane) for _, lane in lanes]
        self._axes.set_yticks(rows, names, minor=True, fontsize=0.75 * SMALL)
        self._axes.tick_params(axis="y", which="both", length=0)


def _color(kind: Kind, chunk: tuple[int, int]) -> str:
    """Return the colour of an action of a rank's chunk: later chunks are lighter."""
    number, count = chunk
    return lighter(_COLORS.get(kind, ("#777777", ""))[0], _LIGHTEST * number / count)


def _legend_entries(panels: Sequence[TimelinePanel]) -> list[tuple[list[str], str]]:
    # FREE takes no time, so it has no cell.
    kinds = {e.action.kind for p in panels for e in p.timeline.events if e.end > e.start}
    count = max((count for panel in panels for _, count in panel.chunks().values()), default=1)
    entries = [
        ([_color(kind, (n, count)) for n in range(count)], _COLORS.get(kind, ("", kind.value))[1])
        for kind in Kind
        if kind in kinds
    ]
    if any(panel.waits for panel in panels):
        entries.append(([_WAIT], "waits for another rank"))
    has_slices = any(panel.timeline.num_sequence_slices > 1 for panel in panels)
    digits = "microbatch.slice" if has_slices else "microbatches"
    entries.append(([_IDLE], f"idle; digits are {digits}"))
    if count > 1:
        entries.append(([], f"dark to light: chunks 0 to {count - 1} of a rank"))
    return entries


def _draw_legend(figure: Figure, entries: Iterable[tuple[list[str], str]], columns: int) -> None:
    from matplotlib.legend_handler import HandlerTuple  # noqa: PLC0415 - as in figures.py
    from matplotlib.patches import Patch  # noqa: PLC0415

    colors, words = zip(*entries, strict=True)
    handles: list[Any] = [
        tuple(Patch(color=color) for color in shades) or Patch(alpha=0) for shades in colors
    ]
    figure.legend(
        handles,
        words,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="lower left",
        ncols=columns,
        fontsize=SMALL,
        frameon=False,
        borderpad=0.1,
    )


def _short_action(timeline: Timeline) -> float:
    """Return the first quartile of the actions' durations, which sets the scale."""
    seconds = sorted(event.end - event.start for event in timeline.events)
    positive = [duration for duration in seconds if duration > 0]
    return positive[len(positive) // 4] if positive else 1.0


def _in_milliseconds(timeline: Timeline) -> Timeline:
    return replace(timeline, events=tuple(_seconds_to_ms(event) for event in timeline.events))


def _seconds_to_ms(piece: Any) -> Any:
    return piece._replace(start=1e3 * piece.start, end=1e3 * piece.end)


def _in_mebibytes(curves: Iterable[Curve]) -> list[Curve]:
    return [[(1e3 * time, memory / 2**20) for time, memory in curve] for curve in curves]

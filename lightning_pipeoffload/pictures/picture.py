"""A timeline as the papers draw it: a row per rank, a cell per action, its microbatch inside.

Colours tell F, B, W and BW apart, shades the chunks of a rank. Under a rank's row are the lanes of
its copies, where there are any, and the curve of its memory, at one scale for all ranks.
"""

from __future__ import annotations

from math import floor, log10

from lightning_pipeoffload.pictures.canvas import (
    CURVE,
    FONT_SIZE,
    LEFT,
    LETTER,
    LINE,
    MARGIN,
    ROW,
    Canvas,
)
from lightning_pipeoffload.pictures.drawing import Area, Box, Drawing, Words
from lightning_pipeoffload.pictures.shade import ink_on, lighter
from lightning_pipeoffload.schedule.actions import Kind
from lightning_pipeoffload.schedule.costs import Costs
from lightning_pipeoffload.schedule.simulation.memory_curve import Curve, memory_curves
from lightning_pipeoffload.schedule.timeline import Event, Timeline

__all__ = ["picture", "round_step"]

COLORS = {
    Kind.F: "#2f6fc4",
    Kind.B: "#1497ad",
    Kind.W: "#5d9e1f",
    Kind.BW: "#d9822b",
    Kind.OFFLOAD: "#8e5bb5",
    Kind.OFFLOAD_W: "#6b4aa8",
    Kind.RELOAD: "#c2557f",
    Kind.RELOAD_B: "#d6455d",
    Kind.RELOAD_W: "#a03c4a",
}
OTHER_COLOR = "#777777"
IDLE_COLOR = "#f0f0f0"
MEMORY_COLOR, MEMORY_OUTLINE = "#d8dce6", "#5c6784"
LIGHTEST = 0.7
SMALLEST_FONT = 6.0
TICK_DISTANCE = 80.0


def picture(timeline: Timeline, costs: Costs, title: str = "") -> Drawing:
    """Draw when each rank computes and copies what, and how much memory it has in use.

    The width follows from the number of actions, up to 4000 pixels and the margins; numbers that
    have no room in their cell are left out.

    Args:
        timeline: What ``simulate`` gave for these costs.
        costs: For the memory curve.
        title: The line above the picture.
    """
    canvas = Canvas.of(timeline)
    canvas.write(LEFT, MARGIN + LINE / 2, title)
    _draw_legend(canvas, MARGIN + LINE)
    for rank in range(timeline.num_ranks):
        _draw_empty_row(canvas, rank)
    for event in timeline.events:
        _draw_event(canvas, event)
    curves = memory_curves(timeline, costs)
    highest = max((memory for curve in curves for _, memory in curve), default=0.0)
    for rank, curve in enumerate(curves):
        _draw_memory(canvas, rank, curve, highest)
    _draw_time_axis(canvas)
    return canvas.drawing


def _color(kind: Kind, chunk: int, num_chunks: int) -> str:
    return lighter(COLORS.get(kind, OTHER_COLOR), LIGHTEST * chunk / num_chunks)


def _draw_legend(canvas: Canvas, top: float) -> None:
    num_chunks = max((count for _, count in canvas.chunks.values()), default=1)
    # FREE takes no time: it has no cell, so its colour would explain nothing.
    there = {event.action.kind for event in canvas.timeline.events if event.end > event.start}
    x = LEFT
    for kind in (kind for kind in Kind if kind in there):
        for chunk in range(num_chunks):
            color = _color(kind, chunk, num_chunks)
            canvas.drawing.boxes.append(Box(x, top + 3, 13, 13, color))
            x += 14
        canvas.write(x + 3, top + LINE / 2, kind.value)
        x += 24 + FONT_SIZE * LETTER * len(kind.value)
    if num_chunks > 1:
        canvas.write(x, top + LINE / 2, f"(chunks 0 to {num_chunks - 1}, dark to light)")


def _draw_empty_row(canvas: Canvas, rank: int) -> None:
    top = canvas.top(rank)
    canvas.write(LEFT - 8, top + ROW / 2, f"rank {rank}", "end")
    width = canvas.timeline.makespan * canvas.scale
    canvas.drawing.boxes.append(Box(LEFT, top, width, ROW - 1, IDLE_COLOR))
    for lane in canvas.copy_lanes:
        lane_top, height = canvas.lane(rank, lane)
        name = Words(LEFT - 8, lane_top + height / 2, lane, height - 1, MEMORY_OUTLINE, "end")
        canvas.drawing.words.append(name)


def _draw_event(canvas: Canvas, event: Event) -> None:
    action = event.action
    top, height = canvas.lane(event.rank, event.lane)
    width = (event.end - event.start) * canvas.scale
    # A gap of a pixel parts equal cells, unless it would be most of what there is.
    width -= 1 if width > 3 else 0
    color = _color(action.kind, *canvas.chunks[action.stage])
    hint = f"{action} on rank {event.rank}, {event.start:g} to {event.end:g} s"
    box = Box(canvas.x(event.start), top, width, height - 1, color, hint)
    canvas.drawing.boxes.append(box)
    if height >= ROW:
        _label(canvas, box, str(action.microbatch))


def _label(canvas: Canvas, box: Box, text: str) -> None:
    size = min(FONT_SIZE, (box.width - 1) / (LETTER * len(text)))
    if size >= SMALLEST_FONT:
        middle = box.x + box.width / 2, box.y + box.height / 2
        canvas.drawing.words.append(Words(*middle, text, size, ink_on(box.color), "middle"))


def _draw_memory(canvas: Canvas, rank: int, curve: Curve, highest: float) -> None:
    bottom = canvas.curve_bottom(rank)
    pixels = (CURVE - 2) / highest if highest else 0.0
    end_of_all = canvas.timeline.makespan
    ends = [time for time, _ in curve[1:]] + [end_of_all]
    steps = [
        (canvas.x(time), bottom - memory * pixels)
        for (start, memory), end in zip(curve, ends, strict=True)
        for time in (start, end)
    ]
    outline = ((canvas.x(0), bottom), *steps, (canvas.x(end_of_all), bottom))
    canvas.drawing.areas.append(Area(outline, MEMORY_COLOR, MEMORY_OUTLINE))
    peak = max(memory for _, memory in curve)
    canvas.write(canvas.x(end_of_all) + 6, bottom - CURVE / 2, f"peak {peak:.4g}")


def _draw_time_axis(canvas: Canvas) -> None:
    top = canvas.top(canvas.timeline.num_ranks)
    step = round_step(TICK_DISTANCE / canvas.scale)
    for tick in range(floor(canvas.timeline.makespan / step + 1e-9) + 1):
        x = canvas.x(tick * step)
        canvas.drawing.boxes.append(Box(x, top - 4, 1, 4, MEMORY_OUTLINE))
        label = f"{tick * step:g}" if tick else "0 s"
        canvas.write(x, top + LINE / 2, label, "middle")


def round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20 and so on that is not less."""
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)

"""A timeline as the papers draw it: a row per rank, a cell per action, its microbatch inside.

Colours tell F, B, W and BW apart, shades the chunks of a rank. Under a rank's row are the lanes of
its copies and reductions, where there are any, and the curve of its memory, at one scale for all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_pipeoffload.pictures.axis import draw_time_axis
from lightning_pipeoffload.pictures.canvas import CURVE, LEFT, MARGIN, ROW, Canvas, Look
from lightning_pipeoffload.pictures.drawing import (
    FONT_SIZE,
    LINE,
    Area,
    Box,
    Drawing,
    Words,
    ink_on,
    stack,
)
from lightning_pipeoffload.pictures.legend import LETTER, color_of, draw_legend
from lightning_pipeoffload.schedule.costs import Costs
from lightning_pipeoffload.schedule.simulation.memory_curve import Curve, memory_curves
from lightning_pipeoffload.schedule.timeline import Event, Timeline

__all__ = ["picture", "pictures_on_one_axis"]

IDLE_COLOR = "#f0f0f0"
MEMORY_COLOR, MEMORY_OUTLINE = "#d8dce6", "#5c6784"
SMALLEST_FONT = 6.0


def picture(
    timeline: Timeline,
    costs: Costs,
    title: str = "",
    look: Look | None = None,
    curves: Sequence[Curve] | None = None,
) -> Drawing:
    """Draw when each rank computes and copies what, and how much memory it has in use.

    The width follows from the number of actions, up to 4000 pixels and the margins; numbers that
    have no room in their cell are left out.

    Args:
        timeline: What ``simulate`` gave for these costs.
        costs: The memory of stages, for the memory curve.
        title: The line above the picture.
        look: The part to show, and its scales; None: all, by scales of its own.
        curves: The memory curve of each rank; None: as the costs say.
    """
    canvas = Canvas.of(timeline, look)
    canvas.drawing.write(LEFT, MARGIN + LINE / 2, title)
    draw_legend(canvas.drawing, LEFT, MARGIN + LINE, canvas.legend)
    for rank in range(timeline.num_ranks):
        _draw_empty_row(canvas, rank)
    for event in filter(canvas.look.window.shows, timeline.events):
        _draw_event(canvas, event)
    curves = memory_curves(timeline, costs) if curves is None else curves
    highest = canvas.look.highest or max((m for curve in curves for _, m in curve), default=0.0)
    for rank, curve in enumerate(curves):
        _draw_memory(canvas, rank, curve, highest)
    top = canvas.top(timeline.num_ranks) - 4
    draw_time_axis(canvas.drawing, top, canvas.look.window, canvas.x, canvas.look.unit)
    return canvas.drawing


def pictures_on_one_axis(
    timelines: Sequence[Timeline], costs: Sequence[Costs], titles: Sequence[str], look: Look
) -> Drawing:
    """Draw several timelines one above the other, at one scale of time and of memory.

    Args:
        timelines: What ``simulate`` gave for the costs.
        costs: The costs of each schedule.
        titles: The line above each timeline.
        look: The part to show, and the scale of time.
    """
    highest = max(max(timeline.peak_memory, default=0.0) for timeline in timelines)
    look = replace(look, highest=highest)
    each = zip(timelines, costs, titles, strict=True)
    return stack([picture(timeline, cost, title, look) for timeline, cost, title in each])


def _draw_empty_row(canvas: Canvas, rank: int) -> None:
    top = canvas.top(rank)
    canvas.drawing.write(LEFT - 8, top + ROW / 2, f"rank {rank}", "end")
    width = canvas.x(canvas.timeline.makespan) - LEFT
    canvas.drawing.boxes.append(Box(LEFT, top, width, ROW - 1, IDLE_COLOR))
    for lane in canvas.narrow_lanes:
        lane_top, height = canvas.lane(rank, lane)
        name = Words(LEFT - 8, lane_top + height / 2, lane, height - 1, MEMORY_OUTLINE, "end")
        canvas.drawing.words.append(name)


def _draw_event(canvas: Canvas, event: Event) -> None:
    action = event.action
    top, height = canvas.lane(event.rank, event.lane)
    width = canvas.x(event.end) - canvas.x(event.start)
    # A gap of a pixel parts equal cells, unless it would be most of what there is.
    width -= 1 if width > 3 else 0
    color = color_of(action.kind, *canvas.chunks[action.stage])
    hint = f"{action} on rank {event.rank}, {event.start:g} to {event.end:g} {canvas.look.unit}"
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
    canvas.drawing.write(canvas.x(end_of_all) + 6, bottom - CURVE / 2, f"peak {peak:.4g}")

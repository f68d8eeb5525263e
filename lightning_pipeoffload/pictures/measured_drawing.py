"""A step as it was measured, and below it the plan that it ran by, at one scale of time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightning_pipeoffload.pictures.canvas import Canvas, Look
from lightning_pipeoffload.pictures.drawing import Box, Drawing, stack
from lightning_pipeoffload.pictures.legend import LegendEntry, color_of
from lightning_pipeoffload.pictures.measured_step import MeasuredStep, Wait
from lightning_pipeoffload.pictures.picture import picture
from lightning_pipeoffload.pictures.window import Window
from lightning_pipeoffload.schedule import Costs, Event, Timeline
from lightning_pipeoffload.schedule.simulation.memory_curve import memory_curves
from lightning_pipeoffload.schedule.timeline import COMPUTE_LANE

__all__ = ["draw_measured"]

_WAIT_COLOR = "#f2b8b0"
_WAIT = LegendEntry((_WAIT_COLOR,), "waits for another rank")
_MILLISECONDS = 1e3
_MIB = 2**20


def draw_measured(
    measured: MeasuredStep, planned: Timeline, costs: Costs, titles: tuple[str, str]
) -> Drawing:
    """Draw both; waits for messages have a colour of their own.

    Args:
        measured: The step.
        planned: What ``simulate`` gave for these costs.
        costs: Costs in seconds and bytes.
        titles: The line above the step, and that above the plan.
    """
    curves = [
        [[(_MILLISECONDS * time, memory / _MIB) for time, memory in curve] for curve in of_ranks]
        for of_ranks in (measured.curves, memory_curves(planned, costs))
    ]
    timelines = [_in_milliseconds(timeline) for timeline in (measured.timeline, planned)]
    highest = max((memory for each in curves for curve in each for _, memory in curve), default=0.0)
    # By what was measured: copies in the plan may be too short to be of any scale.
    look = Look.of(timelines[:1], Window.of_all(timelines), highest, "ms")
    looks = replace(look, explained=(_WAIT,)), look
    drawings = [
        picture(timeline, costs, title, its_look, curve)
        for timeline, title, its_look, curve in zip(timelines, titles, looks, curves, strict=True)
    ]
    canvas = Canvas.of(timelines[0], looks[0])
    _draw_beginnings(drawings[0], canvas, measured.beginnings)
    _draw_waits(drawings[0], canvas, measured.waits)
    return stack(drawings)


def _in_milliseconds(timeline: Timeline) -> Timeline:
    events = tuple(
        event._replace(start=_MILLISECONDS * event.start, end=_MILLISECONDS * event.end)
        for event in timeline.events
    )
    return replace(timeline, events=events)


def _draw_beginnings(drawing: Drawing, canvas: Canvas, beginnings: Iterable[Event]) -> None:
    for event in beginnings:
        color = color_of(event.action.kind, *canvas.chunks[event.action.stage])
        hint = f"{event.action} on rank {event.rank}, before it waits"
        drawing.boxes.append(_box(canvas, event, color, hint))


def _draw_waits(drawing: Drawing, canvas: Canvas, waits: Iterable[Wait]) -> None:
    for wait in waits:
        hint = f"{wait.action} on rank {wait.rank} {wait.words}"
        drawing.boxes.append(_box(canvas, wait, _WAIT_COLOR, hint))


def _box(canvas: Canvas, piece: Event | Wait, color: str, hint: str) -> Box:
    start, end = (_MILLISECONDS * time for time in (piece.start, piece.end))
    left, right = canvas.x(start), canvas.x(end)
    top, height = canvas.lane(piece.rank, COMPUTE_LANE)
    times = f"{hint}, {start:g} to {end:g} ms"
    return Box(left, top, right - left, height - 1, color, times)

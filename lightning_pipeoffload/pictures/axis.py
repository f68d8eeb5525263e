"""The axis of time under a picture."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, log10

from lightning_pipeoffload.pictures.drawing import Box, Drawing
from lightning_pipeoffload.pictures.window import Window

__all__ = ["TICK_COLOR", "draw_time_axis", "round_step"]

TICK_COLOR = "#5c6784"
TICK_DISTANCE = 80.0


def draw_time_axis(
    drawing: Drawing, top: float, window: Window, x_of: Callable[[float], float], unit: str
) -> None:
    """Draw ticks at round times, each with its time below.

    Args:
        drawing: Where to.
        top: Upper edge of the ticks.
        window: The times that are shown.
        x_of: Returns the place of a time.
        unit: What times are counted in.
    """
    scale = (x_of(window.end) - x_of(window.start)) / window.length
    step = round_step(TICK_DISTANCE / scale) if scale else window.length
    first, last = ceil(window.start / step - 1e-9), floor(window.end / step + 1e-9)
    for tick in range(first, last + 1):
        x = x_of(tick * step)
        drawing.boxes.append(Box(x, top, 1, 4, TICK_COLOR))
        label = f"{tick * step:g}" if tick > first else f"{tick * step:g} {unit}".rstrip()
        drawing.write(x, top + 14, label, "middle")


def round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20 and so on that is not less."""
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)

"""Writes schedules, times, bytes and shares as text."""

from __future__ import annotations

import shutil
from math import ceil
from typing import Any

from .actions import COMPUTE_LANE, COPY_LANES, KINDS, Action
from .costs import Costs
from .schedule import Schedule
from .simulation.simulate import simulate
from .timeline import Event, Timeline

_SECONDS: dict[str, Any] = {
    name: 1.0 for row in KINDS.values() if row.lane not in COPY_LANES for name in row.seconds
}
_UNIT = Costs(**_SECONDS)
_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


def draw(drawn: Timeline | Schedule, width: int | None = None) -> str:
    """Draw the actions of each rank over time, a row for each rank, with dots for idle time.

    If the plan has REDUCE or STEP, a second row below each rank shows them.

    The width of an action is proportional to its time. ``F3`` is the forward of microbatch 3;
    ``1F3`` is that of stage 1, if ranks have several stages. An action that is too narrow for its
    label shows its kind.

    Args:
        drawn: A timeline, or a schedule, which is timed without copies: 1 for each action, 2 for
            BW.
        width: The most characters of a row; None: the width of the terminal. The drawing is
            narrower if every label fits.
    """
    timeline = simulate(drawn, _UNIT) if isinstance(drawn, Schedule) else drawn
    events = [event for event in timeline.events if event.lane not in COPY_LANES]
    labels = _labels(events)
    margin = len(_heading(timeline.num_ranks - 1, COMPUTE_LANE))
    scale = _scale(events, labels, (width or shutil.get_terminal_size().columns) - margin)
    lanes = sorted({event.lane for event in events})
    rows = {
        (rank, lane): ["." if lane == COMPUTE_LANE else " "] * round(timeline.makespan * scale)
        for rank in range(timeline.num_ranks)
        for lane in lanes
    }
    for event in events:
        start, end = round(event.start * scale), round(event.end * scale)
        shown = _fit(labels[event.action], event.action, end - start)
        rows[event.rank, event.lane][start:end] = shown
    return "\n".join(_heading(*of).rjust(margin) + "".join(row) for of, row in rows.items())


def _heading(rank: int, lane: str) -> str:
    return f"rank {rank} " if lane == COMPUTE_LANE else f"{lane} "


def _labels(events: list[Event]) -> dict[Action, str]:
    stages = {(event.rank, event.action.stage) for event in events}
    with_stage = len(stages) > len({rank for rank, _ in stages})
    return {e.action: str(e.action) if with_stage else _without_stage(e.action) for e in events}


def _without_stage(action: Action) -> str:
    return f"{action.kind.value}{action.microbatch}"


def _scale(events: list[Event], labels: dict[Action, str], width: int) -> float:
    """Return characters per second: as many as the labels need, or as the width allows."""
    timed = [event for event in events if event.end > event.start and event.lane == COMPUTE_LANE]
    if not timed:
        return 0.0
    wanted = max((1 + len(labels[e.action])) / (e.end - e.start) for e in timed)
    scale = min(wanted, max(1, width) / max(e.end for e in events))
    shortest = min(e.end - e.start for e in timed)
    # A whole number of characters for the shortest action makes equal actions equally wide.
    return max(1, int(scale * shortest + 1e-9)) / shortest if scale * shortest >= 1 else scale


def _fit(label: str, action: Action, width: int) -> str:
    # A label that begins with a stage needs a blank after the microbatch of the label before it.
    needed = len(label) + label[0].isdigit()
    shown = label if needed <= width else action.kind.value
    return shown[:width].ljust(width)


def bytes_text(num_bytes: float, column_max: float = 0.0) -> str:
    """Format bytes, rounded up: "1.50 MiB", below 0.1 MiB "1.50 KiB", from 10 GiB on "12.25 GiB".

    ``column_max``: the largest figure of the same column, in whose unit all are.
    """
    largest = max(num_bytes, column_max)
    size, unit = (_GIB, "GiB") if largest >= 10 * _GIB else (_MIB, "MiB")
    if largest < 0.1 * _MIB:
        size, unit = _KIB, "KiB"
    return f"{ceil(num_bytes / size * 100) / 100:,.2f} {unit}"


def seconds_text(seconds: float) -> str:
    """Format a time: "12.34 s", "48.4 ms" or "120 µs"."""
    if seconds >= 1:
        return f"{seconds:.4g} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"


def share_text(share: float) -> str:
    """Format a share, such as a bubble: "14.1 %"."""
    return f"{100 * share:.1f} %"

"""What one rank did when in a step, in times of its host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_pipeoffload.pictures.measured_step import RankStep
from lightning_pipeoffload.runtime.memory.ledger import Ledger
from lightning_pipeoffload.runtime.timing import TimedStep


def times_of(step: TimedStep, ledger: Ledger, read: Callable[[Any], float]) -> RankStep:
    """Read the moments of a step; actions that ran as one get an even part each, in their order.

    Args:
        step: The last step of a rank.
        ledger: What the rank has kept in it.
        read: A function that returns a moment as the host's time.
    """
    places: dict[int, int] = {}
    actions = []
    for action, spans, shared_by in step.actions:
        place = places.get(id(spans), 0)
        places[id(spans)] = place + 1
        times = [(read(start), read(end)) for start, end in spans]
        actions.append((action, [_part(*span, place, shared_by) for span in times]))
    held = [(entry.action, float(entry.held.device)) for entry in ledger.entries]
    return RankStep(actions, held)


def _part(start: float, end: float, place: int, count: int) -> tuple[float, float]:
    seconds = (end - start) / count
    return start + place * seconds, start + (place + 1) * seconds

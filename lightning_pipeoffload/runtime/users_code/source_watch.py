"""Sees where in a step what it draws from goes on, and leaves all as it was."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from lightning_pipeoffload.runtime.users_code.random_sources import (
    Place,
    Snapshot,
    Source,
    find_sources,
    forget_readings,
    take_snapshot,
)
from lightning_pipeoffload.runtime.users_code.source_kinds import is_same_state


class Draw(NamedTuple):
    """Where a step draws.

    Attributes:
        segment: The segment of the step.
        is_in_block: Whether a block draws, not the step around it.
    """

    segment: int
    is_in_block: bool


class SourceWatch:
    """Watches the sources of a module in one run of its step.

    Args:
        module: The user's module.

    Attributes:
        draws: Where each source that went on did so.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {source: take_snapshot(source) for source in find_sources(module)}
        self._now = dict(self._before)
        self._renewed: set[Source] = set()
        self.draws: dict[Source, set[Draw]] = {}

    def look(self, draw: Draw) -> None:
        """Note which sources went on since the last look."""
        for source, before in self._now.items():
            now = self._now[source] = take_snapshot(source)
            if source.kind.draws and _is_renewed(before, now):
                self._renewed.add(source)
            elif _has_changed(before, now):
                self.draws.setdefault(source, set()).add(draw)

    def made(self) -> list[tuple[Place, Any]]:
        """Return what is drawn from now and was not there before, with all that holds it."""
        known = {source.place for source in self._before}
        now = [source.place for source in find_sources(self._module) if source.kind.draws]
        tops = {place.top for place in now if place not in known}
        return [(place, place.find()) for place in tops]

    def finish(self) -> None:
        """Set all states back."""
        for before in self._before.values():
            if before is not None:
                before.restore()
        forget_readings(self._before)
        for source in self._renewed:  # each step draws from one of its own
            self.draws.pop(source, None)


def _is_renewed(before: Snapshot | None, now: Snapshot | None) -> bool:
    return (before and before.found) is not (now and now.found)


def _has_changed(before: Snapshot | None, now: Snapshot | None) -> bool:
    if before is None or now is None:
        return before is not now
    return not is_same_state(before.state, now.state)

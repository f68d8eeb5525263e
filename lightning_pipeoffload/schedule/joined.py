"""One plan over several batches whose gradients add up, run batch by batch.

Between two batches a loop does other things: it reports the first one's loss, and only then has the
second one. The pipeline need not run empty for that. Each rank's actions are cut into one **part**
for each batch, so that a part holds the forwards of its batch and no action of a later batch;
backwards may be left for later parts, where they go on beside the next batch's forwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .actions import Action, Kind
from .dependencies import Dependencies, outcome
from .schedule import Schedule

__all__ = ["JoinedPlan", "cut_at_batches"]

_FORWARD = {Kind.F, Kind.SEND_F}


class JoinedPlan(NamedTuple):
    """A lowered plan and its parts.

    Attributes:
        plan: over all batches.
        ends: for each rank, where the part of each batch ends among its actions.
    """

    plan: Schedule
    ends: tuple[tuple[int, ...], ...]


def cut_at_batches(plan: Schedule, batch_size: int) -> JoinedPlan | None:
    """Cut every rank's actions into parts.

    No rank waits in one part for what another does in a later one, so that ranks may wait for each
    other between parts, too.

    Args:
        plan: lowered, over the microbatches of all batches.
        batch_size: microbatches of one batch.

    Returns:
        The parts; None if a forward of one batch comes before the last one of the batch before it.
    """
    places = _Places(plan)
    ends: list[tuple[int, ...]] = []
    for count in range(batch_size, plan.num_microbatches, batch_size):
        part = places.closed([_after_forwards(rank, count) for rank in plan])
        if any(
            a.microbatch >= count for rank, end in zip(plan, part, strict=True) for a in rank[:end]
        ):
            return None
        ends.append(tuple(part))
    ends.append(tuple(len(rank) for rank in plan))
    return JoinedPlan(plan, tuple(zip(*ends, strict=True)))


def _after_forwards(actions: tuple[Action, ...], count: int) -> int:
    """Return the place after the last forward of the first ``count`` microbatches."""
    forwards = (i for i, a in enumerate(actions) if a.kind in _FORWARD and a.microbatch < count)
    return 1 + max(forwards)


class _Places:
    """Where in a plan the actions are."""

    def __init__(self, plan: Schedule) -> None:
        self._plan = plan
        self._awaited_by = Dependencies(plan).of
        self._place_of = {
            outcome(action): (rank, place)
            for rank, actions in enumerate(plan)
            for place, action in enumerate(actions)
        }

    def closed(self, ends: list[int]) -> list[int]:
        """Move the ends of every rank's first actions on, until they wait for nothing outside."""
        done, ends = [0] * len(ends), list(ends)
        while done != ends:
            before = list(ends)
            for rank, place in self._awaited(done, before):
                ends[rank] = max(ends[rank], place + 1)
            done = before
        return ends

    def _awaited(self, starts: list[int], ends: list[int]) -> Iterator[tuple[int, int]]:
        for actions, start, end in zip(self._plan, starts, ends, strict=True):
            for action in actions[start:end]:
                awaited = self._awaited_by(action)
                if awaited is not None:
                    yield self._place_of[awaited]

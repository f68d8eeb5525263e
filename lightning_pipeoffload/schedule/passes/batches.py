"""One plan over several batches whose gradients add up, run batch by batch.

Between two batches a loop does other things: it reports the first one's loss, and only then has the
second one. The pipeline need not run empty for that. Each rank's actions are cut into one **part**
for each batch, so that a part holds the forwards of its batch and no action of a later batch;
backwards may be left for later parts, where they go on beside the next batch's forwards. Two
batches of two microbatches each, on the first of two ranks::

    one plan for each   F0 F1 .. B0 W0 B1 W1 | F2 F3 .. B2 W2 B3 W3
    one plan for both   F0 F1 | .. B0 W0 F2 B1 W1 F3 B2 W2 B3 W3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from ..actions import TRANSFERS, Action, Kind
from ..dependencies import Dependencies, outcome
from ..messages import SENDS
from ..schedule import Schedule
from .reduce import add_reductions
from .transfer import lower, split_fused_backward

__all__ = ["JoinedPlan", "cut_at_batches", "repeat_batch"]


class JoinedPlan(NamedTuple):
    """A lowered plan and its parts.

    Attributes:
        plan: The lowered plan over all batches.
        ends: For each rank, where the part of each batch ends among its actions.
    """

    plan: Schedule
    ends: tuple[tuple[int, ...], ...]

    def with_reductions(self) -> JoinedPlan:
        """Return the same with REDUCE once for each stage, behind its last W of all batches."""
        plan = add_reductions(self.plan)
        # A stage's last W is behind its forwards of the last batch, so no other part grows.
        ends = ((*of_rank[:-1], len(rank)) for of_rank, rank in zip(self.ends, plan, strict=True))
        return JoinedPlan(plan, tuple(ends))


def cut_at_batches(schedule: Schedule, batch_size: int) -> JoinedPlan:
    """Cut every rank's actions into parts, and lower them.

    What is early for its part waits until the end of the part before it; all else keeps its order.
    No rank waits in one part for what another does in a later one, so that ranks may wait for each
    other between parts, too.

    Args:
        schedule: A schedule of compute actions over the microbatches of all batches.
        batch_size: Microbatches of one batch.
    """
    schedule = split_fused_backward(schedule)
    awaited_by = Dependencies(schedule)
    left = [list(rank) for rank in schedule]
    taken: list[list[Action]] = [[] for _ in left]
    counts: list[list[int]] = [[] for _ in left]
    for count in range(batch_size, schedule.num_microbatches, batch_size):
        for rank, end in enumerate(_ends_of_part(left, count, awaited_by)):
            head, tail = left[rank][:end], left[rank][end:]
            taken[rank] += [action for action in head if action.microbatch < count]
            left[rank] = [action for action in head if action.microbatch >= count] + tail
            counts[rank].append(len(taken[rank]))
    held = [first + last for first, last in zip(taken, left, strict=True)]
    plan = lower(Schedule.of(held, schedule.name))
    ends = (
        (*(_place_after(actions, count) for count in of_rank), len(actions))
        for actions, of_rank in zip(plan, counts, strict=True)
    )
    return JoinedPlan(plan, tuple(ends))


def _ends_of_part(left: list[list[Action]], count: int, awaited_by: Dependencies) -> list[int]:
    """Say how far each rank goes for the forwards of the first ``count`` microbatches.

    Far enough that what other ranks do until then finds what it waits for.
    """
    places = {outcome(a): (r, i) for r, actions in enumerate(left) for i, a in enumerate(actions)}
    ends = [_after_forwards(actions, count) for actions in left]
    spans = deque((rank, 0, end) for rank, end in enumerate(ends))
    while spans:
        rank, start, end = spans.popleft()
        for action in left[rank][start:end]:
            awaited = awaited_by.of(action) if action.microbatch < count else None
            other, place = places.get(awaited, (rank, -1)) if awaited else (rank, -1)
            # The other rank has to go on until there; what it does on its way may wait, too.
            if place >= ends[other]:
                spans.append((other, ends[other], place + 1))
                ends[other] = place + 1
    return ends


def _after_forwards(actions: list[Action], count: int) -> int:
    forwards = (i for i, a in enumerate(actions) if a.kind is Kind.F and a.microbatch < count)
    return 1 + max(forwards)


def _place_after(actions: tuple[Action, ...], count: int) -> int:
    """Return the place after ``count`` actions that are no transfers, and what they send."""
    for place, action in enumerate(actions):
        if count == 0 and action.kind not in SENDS:
            return place
        count -= action.kind not in TRANSFERS
    return len(actions)


def repeat_batch(schedule: Schedule, num_batches: int) -> Schedule:
    """Return the schedule of batches that follow each other, each rank as soon as it can."""
    size = schedule.num_microbatches

    def repeat(actions: tuple[Action, ...]) -> Iterator[Action]:
        for start in range(0, size * num_batches, size):
            yield from (a._replace(microbatch=a.microbatch + start) for a in actions)

    return Schedule.of(map(repeat, schedule), schedule.name)

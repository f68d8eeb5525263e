"""Whether two schedules add up the same numbers in the same order, so that sums are equal bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from .actions import Action, Kind
from .schedule import Schedule

__all__ = ["sums_alike"]

_ADDS_IN = {Kind.F: (Kind.F,), Kind.B: (Kind.B,), Kind.W: (Kind.W,), Kind.BW: (Kind.B, Kind.W)}


def sums_alike(one: Schedule, other: Schedule, tied: Iterable[Collection[int]] = ()) -> bool:
    """Whether each stage runs its F's, B's and W's in the same order of microbatches in both.

    Stages on one rank that share a weight add to one gradient, so their B's and W's together have
    to be in the same order.

    Args:
        one: A schedule of compute actions.
        other: Another one of the same stages on the same ranks.
        tied: Stages that share a weight.
    """
    if [_orders(rank) for rank in one] != [_orders(rank) for rank in other]:
        return False
    together = [set(stages) for stages in tied]
    return all(
        _gradients(ours, stages) == _gradients(theirs, stages)
        for ours, theirs in zip(one, other, strict=True)
        for stages in together
        if len({action.stage for action in ours} & stages) > 1
    )


def _orders(rank: Sequence[Action]) -> dict[tuple[int, Kind], list[int]]:
    found: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
    for action in rank:
        for kind in _ADDS_IN.get(action.kind, ()):
            found[action.stage, kind].append(action.microbatch)
    return found


def _gradients(rank: Sequence[Action], stages: Collection[int]) -> list[tuple[Kind, int, int]]:
    return [
        (kind, action.stage, action.microbatch)
        for action in rank
        for kind in _ADDS_IN.get(action.kind, ())
        if kind is not Kind.F and action.stage in stages
    ]

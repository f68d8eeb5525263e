"""A plan as numbers, for files and pipes: read several times as fast as words, and as exact."""

from __future__ import annotations

from collections.abc import Sequence

from .actions import Action, Kind
from .schedule import Schedule

__all__ = ["from_numbers", "to_numbers"]

_KINDS = tuple(Kind)


def to_numbers(schedule: Schedule) -> list[list[int]]:
    """Return three numbers for each action of each rank: of its kind, its stage, its microbatch."""
    return [
        [number for a in rank for number in (_KINDS.index(a.kind), *a[1:])] for rank in schedule
    ]


def from_numbers(ranks: Sequence[Sequence[int]], name: str) -> Schedule:
    """Return the plan that :func:`to_numbers` has written; it may be none that is valid.

    Args:
        ranks: The numbers of each rank.
        name: What the schedule is called.

    Raises:
        ValueError: They are not three for each action.
        IndexError: There is no such kind of action.
    """
    return Schedule.of(
        (
            [Action(_KINDS[kind], *place) for kind, *place in zip(*[iter(rank)] * 3, strict=True)]
            for rank in ranks
        ),
        name,
    )

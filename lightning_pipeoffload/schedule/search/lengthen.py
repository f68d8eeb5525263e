"""Make a schedule of few microbatches into one of many, by repeating its steady middle.

What a search finds for a few microbatches per rank holds for any larger number: warm-up and
cool-down stay, and so does the bubble that they leave.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..actions import Action, Kind
from ..schedule import Schedule

__all__ = ["lengthen"]

# Microbatches that one round of the steady middle may hold; it is that of a few ranks together.
ROUNDS = (1, 2, 4)


def lengthen(schedule: Schedule, num_microbatches: int) -> Schedule | None:
    """Repeat on every rank a round of the steady middle until there are so many microbatches.

    The result may be no valid schedule where the middle is not steady: a rank may come to wait for
    ever. Takes time proportional to its number of actions.

    Args:
        schedule: A schedule of compute actions, without copies; each stage takes its microbatches
            in order.
        num_microbatches: At least those of ``schedule``.

    Returns:
        The longer schedule; None where the middle of some rank has no round.
    """
    extra = num_microbatches - schedule.num_microbatches
    ranks = []
    for actions in schedule:
        order = [(action.kind, action.stage) for action in actions]
        longer = _repeat_round(order, extra)
        if longer is None:
            return None
        ranks.append(_number(longer))
    return Schedule.of(ranks)


def _repeat_round(order: list[tuple[Kind, int]], extra: int) -> list[tuple[Kind, int]] | None:
    """Insert ``extra`` microbatches next to the middle, in the order of the round found there."""
    actions = set(order)
    for size in (size for size in ROUNDS if extra % size == 0):
        length = size * len(actions)
        start = _round_near(order, len(order) // 2 - length // 2, length)
        if start is not None:
            middle = order[start : start + length]
            return order[:start] + middle * (extra // size) + order[start:]
    return None


def _round_near(order: Sequence[tuple[Kind, int]], middle: int, length: int) -> int | None:
    """Return where, near ``middle``, this many actions hold each action equally often."""
    num_actions = len(set(order))
    # No farther, as the warm-up and the cool-down are at the ends.
    for distance in range(len(order) // 4):
        for start in (middle - distance, middle + distance):
            counts = Counter(order[start : start + length])
            if len(counts) == num_actions and len(set(counts.values())) == 1:
                return start
    return None


def _number(order: Sequence[tuple[Kind, int]]) -> list[Action]:
    seen: Counter[tuple[Kind, int]] = Counter()
    actions = []
    for kind, stage in order:
        actions.append(Action(kind, stage, seen[kind, stage]))
        seen[kind, stage] += 1
    return actions

"""The actions that a step may run before the step before it has ended on all ranks.

A rank that waits for nobody at a step's border runs on with weights that may have to be taken back:
whether gradients are to be clipped is known when all ranks have ended. What it has run by then is
run again. So it must be something that the other ranks can run again too, and without the last
stage, where the user's step comes to its end::

    rank 0   step n  . F0 F1 F2 | B0 ...     | what is known of step n on all ranks
    rank 1   step n    . F0 F1  | B0 ...       by then, as F0 and B0 have come through all of them
    rank 2   step n      .      | F0 B0 ...

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 4 (post-validation).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .actions import Action, Kind
from .messages import recv_before, recv_of
from .schedule import Schedule

__all__ = ["actions_ahead"]

_STARTS = {Kind.SEND_F, Kind.OFFLOAD}


def actions_ahead(plan: Schedule) -> list[list[Action]]:
    """Return the actions that each rank may run ahead, in order.

    Every message that one of them sends is received by another of them.
    """
    lists = [plan[rank] for rank in range(plan.num_ranks)]
    received: set[Action] = set()
    found: list[list[Action]] = [[] for _ in lists]
    walks = [_walk(plan, *each, received) for each in zip(lists, found, strict=True)]
    before = None
    while before != [*map(len, found)]:
        before = [*map(len, found)]
        for walk in walks:
            next(walk, None)
    return [_with_receives(*each, received) for each in zip(lists, found, strict=True)]


def _walk(
    plan: Schedule, actions: Sequence[Action], found: list[Action], received: set[Action]
) -> Iterator[None]:
    """Move the actions that may run to ``found``; yield where one waits for a message."""
    for action in actions:
        if action.kind is Kind.F and action.stage < plan.num_stages - 1:
            needed = recv_before(plan, action)
            while needed is not None and needed not in received:
                yield
        elif action.kind in (Kind.RECV_F, Kind.RECV_B):
            continue
        elif action.kind not in _STARTS:
            return
        found.append(action)
        if action.kind is Kind.SEND_F:
            received.add(recv_of(action))


def _with_receives(
    actions: Sequence[Action], ahead: Sequence[Action], received: set[Action]
) -> list[Action]:
    """Add the receives in their places; those that come later in the plan at the end."""
    chosen = received.union(ahead)
    before = [action for action in actions if action in chosen]
    last = max(map(before.index, ahead), default=-1) + 1
    return before[:last] + [action for action in before[last:] if action in received]

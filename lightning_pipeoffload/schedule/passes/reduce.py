"""REDUCE behind the last W of each stage, and the W's before it that may run by parameter.

Where several W's of a stage stand right before its REDUCE, they need not run microbatch by
microbatch. Taken together parameter by parameter, each completes a share of the gradients, which
travels while the next one is computed, and only the last share is left when the rank has computed
everything::

    compute  ... B5  W3  B6  W4  B7  W5  W6  W7
    reduce                               ==  ==  ==

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, appendix A.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..actions import Action, Kind, ScheduleError
from ..schedule import Schedule

__all__ = ["Tail", "add_reductions", "tails"]


_WEIGHT_GRADIENTS = {Kind.W, Kind.BW}


def add_reductions(plan: Schedule) -> Schedule:
    """Put the REDUCE of every stage right behind the stage's last W or BW.

    It has the microbatch of that action, which says no more than where it stands.

    Args:
        plan: A lowered plan; a schedule of compute actions will do.

    Raises:
        ScheduleError: It has REDUCE already, or no gradients.
    """
    if plan.has_reductions:
        raise ScheduleError(f"schedule {plan.name} has REDUCE already; add it only once")
    if plan.is_forward_only:
        raise ScheduleError(
            f"schedule {plan.name} has no backward, so there are no gradients to reduce; "
            f"add REDUCE to a plan that trains"
        )
    return Schedule.of(map(_with_reductions, plan), plan.name)


def _with_reductions(actions: Sequence[Action]) -> Iterator[Action]:
    last = {action.stage: action for action in actions if action.kind in _WEIGHT_GRADIENTS}
    for action in actions:
        yield action
        if last.get(action.stage) == action:
            yield action._replace(kind=Kind.REDUCE)


class Tail(NamedTuple):
    """A REDUCE, and the W's before it that may run parameter by parameter.

    Attributes:
        weights: The W's of its stage that stand right before it, in order; none behind a BW.
        reduction: The REDUCE.
    """

    weights: tuple[Action, ...]
    reduction: Action


def tails(actions: Sequence[Action]) -> tuple[Tail, ...]:
    """Return the tail of each REDUCE among a rank's actions, in their order.

    Args:
        actions: The actions as they run, without those of microbatches that are missing.
    """
    places = (place for place, action in enumerate(actions) if action.kind is Kind.REDUCE)
    return tuple(_tail(actions, place) for place in places)


def _tail(actions: Sequence[Action], place: int) -> Tail:
    reduction = actions[place]
    start = place
    while start and _is_weight_of(actions[start - 1], reduction.stage):
        start -= 1
    return Tail(tuple(actions[start:place]), reduction)


def _is_weight_of(action: Action, stage: int) -> bool:
    return action.kind is Kind.W and action.stage == stage

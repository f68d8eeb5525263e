"""What may run parameter by parameter before a stage's gradients are reduced.

Where several W's of a stage stand right before its REDUCE, they need not run microbatch by
microbatch. Taken together parameter by parameter, each completes a share of the gradients, which
travels while the next one is computed, and only the last share is left when the rank has computed
everything::

    compute  ... B5  W3  B6  W4  B7  W5  W6  W7
    reduce                               ==  ==  ==

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, appendix A.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .actions import Action, Kind

__all__ = ["Tail", "tails"]


class Tail(NamedTuple):
    """A REDUCE, and what may run parameter by parameter before it.

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

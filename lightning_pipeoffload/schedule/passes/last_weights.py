"""REDUCE or STEP after the last W of each stage, and the W's before it that run by parameter.

If several W's of a stage come right before its REDUCE, they can run parameter by parameter instead
of microbatch by microbatch. Each completes a share of the gradients, which is sent while the next
one is computed, and only the last share is left when the rank has computed everything::

    compute  ... B5  W3  B6  W4  B7  W5  W6  W7
    reduce                               ==  ==  ==

The same holds for STEP, in which an optimizer on the host steps these shares. It takes longer, so
it needs a longer tail: W's are postponed, at the cost of memory.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, appendix A.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..actions import FINAL, Action, Kind, ScheduleError
from ..costs import Costs
from ..schedule import Schedule

_WEIGHT_GRADIENTS = {Kind.W, Kind.BW}


def add_final_actions(plan: Schedule, kind: Kind = Kind.REDUCE) -> Schedule:
    """Put the REDUCE or STEP of every stage right after the stage's last W or BW.

    It has the microbatch of that action, without further meaning.

    Args:
        plan: A lowered plan; a schedule of compute actions will do.
        kind: One of ``FINAL``.

    Raises:
        ScheduleError: It has one of these already, or no gradients.
    """
    if plan.final_kind is not None:
        there = plan.final_kind.value
        raise ScheduleError(f"schedule {plan.name} has {there} already; add {kind.value} once")
    if plan.is_forward_only:
        raise ScheduleError(
            f"schedule {plan.name} has no backward, so there are no gradients for {kind.value}; "
            f"add it to a plan that trains"
        )
    return plan.with_actions(_with_final(rank, kind) for rank in plan)


def add_final_actions_by_cost(plan: Schedule, costs: Costs, steps_early: bool) -> Schedule:
    """Add REDUCE or STEP to a plan if they take time by these costs, as a run does.

    Args:
        plan: Any plan that trains.
        costs: Its costs.
        steps_early: Whether an optimizer on the host steps as gradients become final.
    """
    names = {Kind.REDUCE: "reduce", Kind.STEP: "step" if steps_early else ""}
    for kind, name in names.items():
        if name and plan.final_kind is None and any(costs.per_stage(name, plan.num_stages)):
            return add_final_actions(plan, kind)
    return plan


def _with_final(actions: Sequence[Action], kind: Kind) -> Iterator[Action]:
    last = {action.stage: action for action in actions if action.kind in _WEIGHT_GRADIENTS}
    for action in actions:
        yield action
        if last.get(action.stage) == action:
            yield action._replace(kind=kind)


def postpone_weight_gradients(schedule: Schedule, count: int) -> Schedule:
    """Delay every W by ``count`` others of its stage, and group the last W's of a rank by stage.

    Each W holds its inputs for longer: a rank's peak grows by up to ``count`` residues of each of
    its stages. No step becomes longer where W's only fill a rank's time: for ZB-H1 up to as many
    as there are ranks.

    Args:
        schedule: A schedule of compute actions; each BW counts as no W.
        count: W's of each stage to postpone; 0 groups the last ones only.
    """
    return schedule.with_actions(_postponed(rank, count) for rank in schedule)


def _postponed(actions: Iterable[Action], count: int) -> list[Action]:
    waiting: defaultdict[int, deque[Action]] = defaultdict(deque)
    order = []
    for action in actions:
        if action.kind is Kind.W:
            waiting[action.stage].append(action)
            if len(waiting[action.stage]) <= count:
                continue
            action = waiting[action.stage].popleft()
        order.append(action)
    order += [action for queue in waiting.values() for action in queue]
    end = len(order)
    while end and order[end - 1].kind is Kind.W:
        end -= 1
    return order[:end] + sorted(order[end:], key=lambda action: -action.stage)


class Tail(NamedTuple):
    """A REDUCE or STEP, and the W's before it that may run parameter by parameter.

    Attributes:
        weights: The W's of its stage that stand right before it, in order; none after a BW.
        final: The REDUCE or STEP.
    """

    weights: tuple[Action, ...]
    final: Action


def tails(actions: Sequence[Action]) -> tuple[Tail, ...]:
    """Return the tail of each REDUCE or STEP among a rank's actions, in their order.

    Args:
        actions: The actions as they run, without those of microbatches that are missing.
    """
    places = (place for place, action in enumerate(actions) if action.kind in FINAL)
    return tuple(_tail(actions, place) for place in places)


def _tail(actions: Sequence[Action], place: int) -> Tail:
    final = actions[place]
    start = place
    while start and _is_weight_of(actions[start - 1], final.stage):
        start -= 1
    return Tail(tuple(actions[start:place]), final)


def _is_weight_of(action: Action, stage: int) -> bool:
    return action.kind is Kind.W and action.stage == stage

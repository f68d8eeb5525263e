"""The pass that puts REDUCE: a stage's gradients over the replicas, once they are complete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..actions import Action, Kind, ScheduleError
from ..schedule import Schedule

__all__ = ["add_reductions"]

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

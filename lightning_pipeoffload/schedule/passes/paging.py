"""Copies for an order that a memory limit is too small for, at the cost of time.

As a machine pages memory: where there is no room, what is needed last goes to the host; it comes
back before what needs it, earlier if there is room. The rank may wait for these copies; but where
no plan hides them, it is one, and a solver can start from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from ..actions import (
    ACTIVATION,
    MEMORY_EFFECTS,
    RELOADS,
    WAITING,
    Action,
    Kind,
    MemoryLimitError,
    Part,
)
from ..costs import Costs
from ..schedule import Schedule
from ..search.problem import ROUNDING
from ..simulation.memory import PartSizes, memory_changes, part_sizes
from .transfer import split_every_backward

__all__ = ["least_memory", "paged"]

_Place = tuple[int, int]

_FEW_PLACES = 5  # by so many actions and copies a copy back begins earlier, if there is room


def paged(schedule: Schedule, costs: Costs, memory_limit: float) -> Schedule:
    """Return the same order with every BW as B and W, and with the copies that a limit asks for.

    Args:
        schedule: Compute actions.
        costs: The memory of its stages.
        memory_limit: The most memory of a rank.

    Raises:
        MemoryLimitError: One stage and microbatch needs more than the limit.
    """
    apart = split_every_backward(schedule)
    sizes = part_sizes(costs, schedule.num_stages)
    limit = memory_limit * (1 + ROUNDING)
    needed = least_memory(costs, schedule.num_stages)
    if needed > limit:
        sentence = "{limit} is less than the {needed} that one microbatch needs; use at least that"
        raise MemoryLimitError(sentence, memory_limit, needed)
    ranks = (_early(list(_Paging(rank, sizes, limit).run()), sizes, limit) for rank in apart)
    return Schedule.of(ranks, schedule.name)


def least_memory(costs: Costs, num_stages: int) -> float:
    """Return what a rank needs that copies all but what it works on: one stage and microbatch.

    Args:
        costs: The memory of the stages.
        num_stages: The number of stages of all ranks.
    """
    sizes = part_sizes(costs, num_stages)
    return max(max(of_stage[ACTIVATION], of_stage[WAITING]) for of_stage in sizes)


class _Paging:
    """One rank's way through its actions, and what is on its device on the way.

    Args:
        order: The rank's actions.
        sizes: The memory of the parts of every stage.
        limit: The most memory.
    """

    def __init__(self, order: tuple[Action, ...], sizes: list[PartSizes], limit: float) -> None:
        self._order, self._sizes, self._limit = order, sizes, limit
        self._index = {action: index for index, action in enumerate(order)}
        self._there: dict[_Place, int] = {}
        self._brought: dict[_Place, set[Kind]] = {}
        self._frees: dict[int, list[Action]] = {}

    def run(self) -> Iterator[Action]:
        """Yield the rank's actions and its copies."""
        for action in self._order:
            self._go_to(action)
        for index, action in enumerate(self._order):
            brought = self._brought.get(action[1:], set())
            yield from self._frees.get(index, ())
            yield from self._back(action, brought)
            yield action
            copy = {Kind.F: Kind.OFFLOAD, Kind.B: Kind.OFFLOAD_W}.get(action.kind)
            if copy in brought:
                yield action._replace(kind=copy)

    def _back(self, action: Action, brought: set[Kind]) -> Iterator[Action]:
        if action.kind is Kind.B and Kind.OFFLOAD in brought:
            in_parts = Kind.OFFLOAD_W in brought
            yield action._replace(kind=Kind.RELOAD_B if in_parts else Kind.RELOAD)
        if action.kind is Kind.W and Kind.OFFLOAD_W in brought:
            yield action._replace(kind=Kind.RELOAD_W)

    def _go_to(self, action: Action) -> None:
        """Make room for an action, and for what it needs."""
        place, size = action[1:], self._sizes[action.stage]
        puts, drops = MEMORY_EFFECTS[action.kind]
        needed = _NEEDED[action.kind]
        after = (needed & ~drops) | puts
        self._there[place] = int(needed)
        most = max(size[needed], size[after])
        while most + self._in_use(place) > self._limit:
            self._evict(place, self._index[action])
        self._there[place] = int(after)

    def _in_use(self, but: _Place) -> float:
        return sum(self._sizes[p[0]][parts] for p, parts in self._there.items() if p != but)

    def _evict(self, but: _Place, now: int) -> None:
        """Bring to the host what is needed last."""
        held = (place for place, parts in self._there.items() if place != but and parts)
        place = max(held, key=self._next_use)
        waits_for_w = self._there[place] & WAITING and not self._is_before_b(place, now)
        kinds = (Kind.OFFLOAD_W, Kind.FREE_W) if waits_for_w else (Kind.OFFLOAD, Kind.FREE)
        self._brought.setdefault(place, set()).add(kinds[0])
        self._frees.setdefault(now, []).append(Action(kinds[1], *place))
        self._there[place] = 0

    def _is_before_b(self, place: _Place, now: int) -> bool:
        return now <= self._index[Action(Kind.B, *place)]

    def _next_use(self, place: _Place) -> int:
        kind = Kind.W if self._has_gradient(place) else Kind.B
        return self._index[Action(kind, *place)]

    def _has_gradient(self, place: _Place) -> bool:
        return bool(self._there[place] & Part.GRADIENT)


def _early(actions: list[Action], sizes: list[PartSizes], limit: float) -> list[Action]:
    """Let copies back begin a few actions earlier, where there is room."""
    changes = list(memory_changes(actions, sizes, MEMORY_EFFECTS))
    # What there is before each action, and after the last.
    levels = list(accumulate(changes, initial=0.0))
    for end, action in enumerate([*actions]):
        start = end
        while action.kind in RELOADS and start > max(0, end - _FEW_PLACES):
            before = actions[start - 1]
            if (
                before[1:] == action[1:]
                or max(levels[start - 1 : start + 1]) + changes[end] > limit
            ):
                break
            start -= 1
        actions[start : end + 1] = [action, *actions[start:end]]
        changes[start : end + 1] = [changes[end], *changes[start:end]]
        levels[start : end + 2] = accumulate(changes[start : end + 1], initial=levels[start])
    return actions


_NEEDED = {Kind.F: Part(0), Kind.B: ACTIVATION, Kind.W: WAITING}

"""Copies for an order that a memory limit is too small for, at the cost of time.

As a machine pages memory: where there is no room, the part that is needed last goes to the host; it
comes back before the action that needs it, earlier if there is room. Ranks may wait for these
copies; but where no plan hides them, a solver can start from this one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate

from ..actions import ACTIVATION, KINDS, MEMORY_EFFECTS, RELOADS, WAITING, Action, Kind, Part
from ..costs import Costs
from ..schedule import Schedule
from ..search.problem import ROUNDING
from ..simulation.memory import memory_changes, part_sizes
from .transfer import split_every_backward

__all__ = ["least_memory", "paged"]

_Place = tuple[int, int]

_FEW_PLACES = 5  # by so many actions and copies a copy back begins earlier, if there is room


def paged(schedule: Schedule, costs: Costs, memory_limit: float) -> Schedule | None:
    """Return the same order with every BW as B and W, and with the copies that a limit asks for.

    None: one stage and microbatch needs more than the limit.
    """
    sizes = part_sizes(costs, schedule.num_stages)
    limit = memory_limit * (1 + ROUNDING)
    if least_memory(costs, schedule.num_stages) > limit:
        return None
    apart = split_every_backward(schedule)
    ranks = (_early(list(_Paging(rank, sizes, limit).run()), sizes, limit) for rank in apart)
    return Schedule.of(ranks, schedule.name)


def least_memory(costs: Costs, num_stages: int) -> float:
    """Return the memory of a rank that has one stage and microbatch on its device at a time."""
    sizes = part_sizes(costs, num_stages)
    return max(max(of_stage[ACTIVATION], of_stage[WAITING]) for of_stage in sizes)


class _Paging:
    """One rank's actions, and what is on its device before and after each."""

    def __init__(self, order: tuple[Action, ...], sizes: list[list[float]], limit: float) -> None:
        self._order, self._sizes, self._limit = order, sizes, limit
        self._index = {action: index for index, action in enumerate(order)}
        self._device: dict[_Place, int] = {}
        self._copied: defaultdict[_Place, set[Kind]] = defaultdict(set)
        self._frees: defaultdict[int, list[Action]] = defaultdict(list)

    def run(self) -> Iterator[Action]:
        """Yield the rank's actions and its copies."""
        for index, action in enumerate(self._order):
            if action.kind in MEMORY_EFFECTS:
                self._make_room(index, action)
        for index, action in enumerate(self._order):
            copied = self._copied[action[1:]]
            yield from self._frees[index]
            if action.kind is Kind.B and Kind.OFFLOAD in copied:
                in_parts = Kind.OFFLOAD_W in copied
                yield action._replace(kind=Kind.RELOAD_B if in_parts else Kind.RELOAD)
            if action.kind is Kind.W and Kind.OFFLOAD_W in copied:
                yield action._replace(kind=Kind.RELOAD_W)
            yield action
            copy = {Kind.F: Kind.OFFLOAD, Kind.B: Kind.OFFLOAD_W}.get(action.kind)
            if copy in copied:
                yield action._replace(kind=copy)

    def _make_room(self, index: int, action: Action) -> None:
        """Make room for an action and its inputs."""
        place, size, row = action[1:], self._sizes[action.stage], KINDS[action.kind]
        # B keeps what W alone needs on the device.
        before = ACTIVATION if action.kind is Kind.B else row.needs
        after = (before & ~row.drops) | row.puts
        self._device[place] = int(before)
        most = max(size[before], size[after])
        while most + self._in_use(place) > self._limit:
            self._evict(place, index)
        self._device[place] = int(after)

    def _in_use(self, but: _Place) -> float:
        return sum(self._sizes[p[0]][parts] for p, parts in self._device.items() if p != but)

    def _evict(self, but: _Place, now: int) -> None:
        """Copy the part that is needed last to the host."""
        held = (place for place, parts in self._device.items() if place != but and parts)
        place = max(held, key=self._next_use)
        is_before_b = now <= self._index[Action(Kind.B, *place)]
        waits_for_w = self._device[place] & WAITING and not is_before_b
        kinds = (Kind.OFFLOAD_W, Kind.FREE_W) if waits_for_w else (Kind.OFFLOAD, Kind.FREE)
        self._copied[place].add(kinds[0])
        self._frees[now].append(Action(kinds[1], *place))
        self._device[place] = 0

    def _next_use(self, place: _Place) -> int:
        kind = Kind.W if self._device[place] & Part.GRADIENT else Kind.B
        return self._index[Action(kind, *place)]


def _early(actions: list[Action], sizes: list[list[float]], limit: float) -> list[Action]:
    """Start copies back a few actions earlier, where there is room."""
    changes = list(memory_changes(actions, sizes, MEMORY_EFFECTS))
    # What there is before each action, and after the last.
    levels = list(accumulate(changes, initial=0.0))
    for end, action in enumerate([*actions]):
        start = end
        while action.kind in RELOADS and start > max(0, end - _FEW_PLACES):
            is_own = actions[start - 1][1:] == action[1:]
            if is_own or max(levels[start - 1 : start + 1]) + changes[end] > limit:
                break
            start -= 1
        actions[start : end + 1] = [action, *actions[start:end]]
        changes[start : end + 1] = [changes[end], *changes[start:end]]
        levels[start : end + 2] = accumulate(changes[start : end + 1], initial=levels[start])
    return actions

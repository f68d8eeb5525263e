"""The order of each rank's actions, read off the times that a solver gives them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ..actions import Action, Kind
from ..schedule import Schedule
from .hinted_model import Hinted
from .pass_model import CopyModel, PassModel

__all__ = ["read_plan"]

# Of what is at one time: memory is let go before any is taken.
_FREE, _COPY, _COMPUTE = range(3)


class _Entry(NamedTuple):
    begin: int
    turn: int
    start: int  # of a copy; of what computes the end, so that what takes no time comes first
    step: int  # F, B, W
    action: Action


def read_plan(
    passes: Iterable[PassModel], placement: tuple[int, ...], value: Callable[[Hinted], int]
) -> Schedule:
    """Return the plan of a solution.

    Args:
        passes: Every stage and microbatch.
        placement: The rank of every stage.
        value: Gives the value of a number.
    """
    ranks: list[list[_Entry]] = [[] for _ in range(max(placement) + 1)]
    for of in passes:
        ranks[placement[of.place[0]]] += _entries(of, value)
    orders = ([entry.action for entry in sorted(_in_turn(rank))] for rank in ranks)
    return Schedule.of(orders, "optpipe")


def _entries(of: PassModel, value: Callable[[Hinted], int]) -> Iterator[_Entry]:
    for step, (kind, begin) in enumerate(of.begins.items()):
        yield _Entry(value(begin), _COMPUTE, value(of.ends[kind]), step, of.action(kind))
    if of.copies is None:
        return
    offload, reload, queue, rest, in_parts = of.copies

    def offloaded(copy: CopyModel, kind: Kind, saved_by: Kind, freed_by: Kind) -> Iterator[_Entry]:
        if value(copy.flag):
            ready = value(of.ends[saved_by])
            yield _Entry(ready, _COPY, value(copy.start), 0, of.action(kind))
            yield _Entry(value(copy.end), _FREE, 0, 0, of.action(freed_by))

    def reloaded(copy: CopyModel, kind: Kind) -> Iterator[_Entry]:
        if value(copy.flag):
            yield _Entry(value(copy.begin), _COPY, value(copy.start), 0, of.action(kind))

    yield from offloaded(offload, Kind.OFFLOAD, Kind.F, Kind.FREE)
    yield from reloaded(reload, Kind.RELOAD_B if value(in_parts) else Kind.RELOAD)
    yield from offloaded(queue, Kind.OFFLOAD_W, Kind.B, Kind.FREE_W)
    yield from reloaded(rest, Kind.RELOAD_W)


def _in_turn(entries: list[_Entry]) -> Iterator[_Entry]:
    """Let a rank begin each copy before the last action that starts by then, so in their turn.

    It begins no copy in the middle of an action; one that has begun waits for its lane.
    """
    begins = sorted(entry.begin for entry in entries if entry.turn == _COMPUTE)
    for entry in entries:
        before = bisect_right(begins, entry.start)
        if entry.turn == _COPY and before:
            yield entry._replace(begin=max(entry.begin, begins[before - 1]))
        else:
            yield entry

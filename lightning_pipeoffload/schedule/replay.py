"""A topological order of all ranks' actions.

Validation checks whether there is one; simulation and searches compute its times. All of them work
on integers: an operation is a kind at a stage; an action is its operation times the number of
microbatches plus its microbatch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

from .actions import RECVS, Action, Kind, ScheduleError
from .messages import recv_before, send_of
from .schedule import Schedule


@dataclass
class Replay:
    """Actions in topological order: each comes after the action that it waits for.

    Attributes:
        ranks: The rank of each action.
        operations: The operation of each action.
        awaited: The index, in this order, of the action on another rank or stage that it waits for;
            -1 if there is none.
        blocked: The actions that never run, with the ranks that wait for them.
        places: The number of actions that each rank has run.
    """

    ranks: list[int] = field(default_factory=list)
    operations: list[int] = field(default_factory=list)
    awaited: list[int] = field(default_factory=list)
    blocked: dict[int, list[int]] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)

    def time(
        self,
        seconds: Iterable[float],
        delays: Iterable[float],
        starts: Sequence[float],
        lane_uses: Iterable[Any] | None = None,
        reach: Callable[[Any, int, float, list[float]], float] | None = None,
    ) -> tuple[list[float], list[float], list[float]]:
        """Return the start and the end of each action, and the end of each rank's last action.

        Args:
            seconds: Seconds of each action on its rank's compute lane.
            delays: Seconds from the end of the awaited action until the rank has its result.
            starts: The start of each rank.
            lane_uses: An object for each action that involves other lanes, None for other actions.
            reach: Called with such an object, the action's index, the time at which its rank
                reaches it, and the ends so far; returns the start of the action.
        """
        clocks = [*starts]
        begins: list[float] = []
        ends: list[float] = []
        uses = lane_uses or repeat(None)
        columns = zip(self.ranks, self.awaited, seconds, delays, uses, strict=False)
        for rank, awaited, duration, delay, other in columns:
            start = clocks[rank]
            if awaited >= 0:
                arrival = ends[awaited] + delay
                if arrival > start:
                    start = arrival
            if other is not None and reach is not None:
                start = reach(other, len(ends), start, ends)
            begins.append(start)
            end = clocks[rank] = start + duration
            ends.append(end)
        return begins, ends, clocks


def replay_numbers(
    ranks: Sequence[Sequence[int]],
    waits: Sequence[int],
    results: Sequence[int],
    num_microbatches: int,
) -> Replay:
    """Sort the actions of all ranks topologically, in linear time.

    Args:
        ranks: The actions of each rank, as integers.
        waits: For each operation, the difference from an action's integer to that of the action
            that it waits for; 0: none.
        results: For each operation, the difference to the integer by which others wait for it.
        num_microbatches: Microbatches of one step.
    """
    order = Replay(places=[0] * len(ranks))
    blocked = order.blocked
    add_rank, add_operation = order.ranks.append, order.operations.append
    add_awaited, count = order.awaited.append, 0
    where: dict[int, int] = {}
    runnable = deque(range(len(ranks)))
    while runnable:
        rank = runnable.popleft()
        actions, place = ranks[rank], order.places[rank]
        while place < len(actions):
            action = actions[place]
            operation = action // num_microbatches
            wait, awaited = waits[operation], -1
            if wait:
                awaited = where.get(action + wait, -1)
                if awaited < 0:
                    blocked.setdefault(action + wait, []).append(rank)
                    break
            result = action + results[operation]
            where[result] = count
            count += 1
            add_rank(rank)
            add_operation(operation)
            add_awaited(awaited)
            if blocked and result in blocked:
                runnable.extend(blocked.pop(result))
            place += 1
        order.places[rank] = place
    return order


_KINDS = tuple(Kind)


def operations_of(schedule: Schedule) -> list[tuple[Kind, int, int]]:
    """Return the operations of a schedule's replay: by kind, then by stage, then by slice."""
    stages, slices = range(schedule.num_stages), range(schedule.num_sequence_slices)
    return [(kind, stage, part) for kind in _KINDS for stage in stages for part in slices]


def replay(schedule: Schedule) -> Replay:
    """Sort a schedule's actions topologically; for its operations see :func:`operations_of`.

    Raises:
        ScheduleError: There is no such order, because ranks wait for each other.
    """
    count, num_slices = schedule.num_microbatches, schedule.num_sequence_slices
    operations = operations_of(schedule)
    number = {operation: n * count for n, operation in enumerate(operations)}
    first = {kind: number[kind, 0, 0] for kind in _KINDS}
    waits, results = [0] * len(operations), [0] * len(operations)
    for n, (kind, stage, part) in enumerate(operations):
        if kind in schedule.kinds:
            awaited = _awaited_by(schedule, Action(kind, stage, part))
            if awaited and awaited in number:
                waits[n] = number[awaited] - n * count
            if kind is Kind.BW:  # an action that waits for B waits for BW where B and W are one
                results[n] = first[Kind.B] - first[Kind.BW]
    if num_slices == 1:
        ranks = [[first[kind] + s * count + m for kind, s, m in rank] for rank in schedule]
    else:
        ranks = [
            [number[kind, s, unit % num_slices] + unit // num_slices for kind, s, unit in rank]
            for rank in schedule
        ]
    order = replay_numbers(ranks, waits, results, count)
    if order.blocked:
        blocked = {
            _action_of(operations[number // count], number % count, num_slices): ranks
            for number, ranks in order.blocked.items()
        }
        raise _deadlock(schedule, blocked, order.places)
    return order


def _action_of(operation: tuple[Kind, int, int], microbatch: int, num_slices: int) -> Action:
    kind, stage, part = operation
    return Action(kind, stage, microbatch * num_slices + part)


def _awaited_by(schedule: Schedule, action: Action) -> Action | None:
    """Return the action that one waits for, apart from those before it on its rank; BW counts as B.

    One action is enough: once the B of the next stage is done, this stage's F is done too. In a
    lowered plan F and B wait for a RECV, and a RECV for the SEND on the other rank.
    """
    kind, stage, microbatch = action
    if schedule.has_transfers and (recv := recv_before(schedule, action)):
        return recv
    if kind is Kind.F:
        return action._replace(stage=stage - 1) if stage else None
    if kind in (Kind.B, Kind.BW):
        if stage == schedule.num_stages - 1:
            return action._replace(kind=Kind.F)
        return Action(Kind.B, stage + 1, microbatch)
    if kind in RECVS:
        return send_of(action)
    own_stage = {Kind.W: Kind.B, Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.B}
    return action._replace(kind=own_stage[kind]) if kind in own_stage else None


def _deadlock(
    schedule: Schedule, blocked: dict[Action, list[int]], places: Sequence[int]
) -> ScheduleError:
    waits = sorted((rank, awaited) for awaited, ranks in blocked.items() for rank in ranks)
    chain = "; ".join(
        f"rank {rank} is at {schedule[rank][places[rank]]} and waits for {awaited}"
        for rank, awaited in waits
    )
    rank = waits[0][0]
    return ScheduleError(
        f"deadlock: {chain}; put what is waited for before what waits\n"
        + grid_around(schedule, rank, places[rank])
    )


def grid_around(schedule: Schedule, rank: int, step: int, context: int = 4) -> str:
    """Draw some steps (rows) of all ranks (columns) before and after one action, and mark it."""
    longest = max(len(actions) for actions in schedule)
    shown = range(max(0, step - context), min(longest, step + context + 1))
    rows = [["step", *(f"rank {r}" for r in range(schedule.num_ranks))]]
    rows += [[str(s), *(str(rank[s]) if s < len(rank) else "" for rank in schedule)] for s in shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines[1 + step - shown.start] += f"  <-- ERROR HERE (rank {rank})"
    return "\n".join(line.rstrip() for line in lines)

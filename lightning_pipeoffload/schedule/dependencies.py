"""What an action waits for, and a replay of all ranks in an order that respects it.

The validator asks whether such an order exists, the simulator when each action then runs; both go
through the same replay, so a schedule that is accepted is one that can be timed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from .actions import Action, Kind, ScheduleError
from .messages import RECVS, recv_before, send_of
from .schedule import Schedule

__all__ = ["Dependencies", "Step", "grid_around", "replay"]


def grid_around(schedule: Schedule, rank: int, step: int, context: int = 4) -> str:
    """Draw the steps (rows) of all ranks (columns) around one action, and mark it.

    Args:
        schedule: What to draw.
        rank: The rank of the action to mark.
        step: Its place among the rank's actions.
        context: How many steps to show before and after it.
    """
    longest = max(len(actions) for actions in schedule)
    shown = range(max(0, step - context), min(longest, step + context + 1))
    rows = [["step", *(f"rank {r}" for r in range(schedule.num_ranks))]]
    rows += [[str(s), *(_cell(schedule, r, s) for r in range(schedule.num_ranks))] for s in shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    lines[1 + step - shown.start] += f"  <-- ERROR HERE (rank {rank})"
    return "\n".join(line.rstrip() for line in lines)


def _cell(schedule: Schedule, rank: int, step: int) -> str:
    actions = schedule[rank]
    return str(actions[step]) if step < len(actions) else ""


class Step(NamedTuple):
    """One action of a replay.

    Attributes:
        rank: The rank that runs it.
        action: The action.
        awaited: The action whose outcome it waited for; None: only the one before it on its rank.
    """

    rank: int
    action: Action
    awaited: Action | None


class Dependencies:
    """What each action of a schedule waits for, beside the action before it on its rank.

    One thing is enough, since the rest follows: where the B of the next stage is done, so is this
    stage's F. Where transfers
    are spelled out, F and B wait for a RECV, and a RECV for the SEND on the other rank; where they
    are not, F and B wait for the neighbour's F and B.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._last_stage = schedule.num_stages - 1

    def of(self, action: Action) -> Action | None:
        """Return what an action waits for; None where it is nothing.

        What is B or BW is named as B. Kinds that only wait for the action before them on their rank
        give None.
        """
        kind, stage, microbatch = action
        if self._schedule.has_transfers and (recv := recv_before(self._schedule, action)):
            return recv
        if kind is Kind.F:
            return Action(Kind.F, stage - 1, microbatch) if stage > 0 else None
        if kind in (Kind.B, Kind.BW):
            last = stage == self._last_stage
            return (
                Action(Kind.F, stage, microbatch) if last else Action(Kind.B, stage + 1, microbatch)
            )
        if kind in RECVS:
            return send_of(action)
        return Action(_OWN_STAGE[kind], stage, microbatch) if kind in _OWN_STAGE else None


_OWN_STAGE = {Kind.W: Kind.B, Kind.SEND_F: Kind.F, Kind.SEND_B: Kind.B}


def outcome(action: Action) -> Action:
    """Return what others wait for when they wait for this action (BW counts as B)."""
    kind, stage, microbatch = action
    return Action(Kind.B, stage, microbatch) if kind is Kind.BW else action


def replay(schedule: Schedule) -> Iterator[Step]:
    """Yield every action after what it waits for and after those before it on its rank.

    Takes time proportional to the number of actions.

    Raises:
        ScheduleError: There is no such order, because ranks wait for each other.
    """
    awaited_by = Dependencies(schedule).of
    position = [0] * schedule.num_ranks
    done: set[Action] = set()
    blocked: defaultdict[Action, list[int]] = defaultdict(list)
    runnable = deque(range(schedule.num_ranks))
    while runnable:
        rank = runnable.popleft()
        actions = schedule[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            awaited = awaited_by(action)
            if awaited is not None and awaited not in done:
                blocked[awaited].append(rank)
                break
            position[rank] += 1
            yield Step(rank, action, awaited)
            brought_about = outcome(action)
            done.add(brought_about)
            if brought_about in blocked:
                runnable.extend(blocked.pop(brought_about))
    if blocked:
        raise _deadlock(schedule, blocked, position)


def _deadlock(
    schedule: Schedule, blocked: dict[Action, list[int]], position: list[int]
) -> ScheduleError:
    waits = sorted((rank, awaited) for awaited, ranks in blocked.items() for rank in ranks)
    chain = "; ".join(
        f"rank {rank} is at {schedule[rank][position[rank]]} and waits for {awaited}"
        for rank, awaited in waits
    )
    rank = waits[0][0]
    return ScheduleError(
        f"deadlock: {chain}; put what is waited for before what waits\n"
        + grid_around(schedule, rank, position[rank])
    )

"""How much memory a rank's messages take while they are on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import accumulate

from ..actions import Action, Kind
from ..messages import RECVS, SENDS, arrived_before, recv_before, send_of, sends_before
from ..schedule import Schedule

__all__ = ["peak_message_memory"]


def peak_message_memory(plan: Schedule, size: Callable[[Action], float]) -> tuple[float, ...]:
    """Return the largest sum of each rank's messages at a time.

    A message takes memory from its SEND on until the rank knows that it has arrived, or from when
    it can come until the action that needs it.

    Args:
        plan: A lowered plan.
        size: A function that returns the memory of what a SEND sends.
    """
    return tuple(_peak(plan, rank, size) for rank in range(plan.num_ranks))


def _peak(plan: Schedule, rank: int, size: Callable[[Action], float]) -> float:
    walk = _Walk(plan, rank, size)
    return max(accumulate(map(walk.change, plan[rank]), initial=0.0))


class _Walk:
    """One rank's way through its plan."""

    def __init__(self, plan: Schedule, rank: int, size: Callable[[Action], float]) -> None:
        self._plan, self._size = plan, size
        self._before = sends_before(plan, rank)
        self._arrived = arrived_before(plan, rank)
        receives = (action for action in plan[rank] if action.kind in RECVS)
        self._to_receive = deque(sorted(receives, key=self._before.__getitem__))
        self._num_sent = 0
        self._sent: set[Action] = set()

    def change(self, action: Action) -> float:
        """Return what an action adds to the memory of messages, negative for what it takes away."""
        if action.kind in SENDS:
            self._num_sent += 1
            self._sent.add(action)
            return self._size(action) + self._post(self._num_sent)
        if action.kind in RECVS:
            return self._post(max(self._num_sent, self._before[action]))
        if action.kind is Kind.FREE:
            return -self._release(action._replace(kind=Kind.SEND_F))
        needed = recv_before(self._plan, action)
        if needed is None:
            return 0.0
        told = sum(self._release(send) for send in self._arrived.get(needed, ()))
        return -told - self._size(send_of(needed))

    def _post(self, num_sent: int) -> float:
        """Make room for all that follows from so many messages of this rank."""
        posted = 0.0
        while self._to_receive and self._before[self._to_receive[0]] <= num_sent:
            posted += self._size(send_of(self._to_receive.popleft()))
        return posted

    def _release(self, send: Action) -> float:
        if send not in self._sent:
            return 0.0
        self._sent.remove(send)
        return self._size(send)

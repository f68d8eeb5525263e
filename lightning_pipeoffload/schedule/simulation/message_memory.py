"""How much memory a rank's messages take while they are on their way."""

from __future__ import annotations

from collections.abc import Callable

from ..actions import Action
from ..messages import RECVS, SENDS, arrived_before, recv_before, send_of
from ..open_receives import OpenReceives
from ..schedule import Schedule

__all__ = ["peak_message_memory"]


def peak_message_memory(plan: Schedule, size: Callable[[Action], float]) -> tuple[float, ...]:
    """Return the largest sum of each rank's messages at a time.

    A message takes memory from its SEND on until the rank knows that it has arrived, or from its
    receive on until the action that needs it.

    Args:
        plan: A lowered plan.
        size: A function that returns the memory of what a SEND sends.
    """
    return tuple(_peak(plan, rank, size) for rank in range(plan.num_ranks))


def _peak(plan: Schedule, rank: int, size: Callable[[Action], float]) -> float:
    walk = _Walk(plan, rank, size)
    return max(map(walk.run, plan[rank]), default=0.0)


class _Walk:
    """One rank's way through its plan."""

    def __init__(self, plan: Schedule, rank: int, size: Callable[[Action], float]) -> None:
        self._plan, self._size = plan, size
        self._arrived = arrived_before(plan, rank)
        self._receives = OpenReceives(plan, rank, self._post)
        self._receives.expect(plan[rank])
        self._held = 0.0
        self._taken: set[Action] = set()

    def run(self, action: Action) -> float:
        """Run an action; return the memory of messages after it."""
        needed = recv_before(self._plan, action)
        if action.kind in SENDS:
            self._held += self._size(action)
            self._receives.count_send()
        elif action.kind in RECVS:
            self._receives.reach(action)
        elif needed is not None:
            self._take(needed)
        return self._held

    def _post(self, receive: Action, source: int) -> None:
        self._held += self._size(send_of(receive))

    def _take(self, needed: Action) -> None:
        if needed not in self._taken:
            for taken in self._receives.until(needed):
                self._taken.add(taken)
                self._held -= sum(map(self._size, self._arrived.get(taken, ())))
        self._held -= self._size(send_of(needed))

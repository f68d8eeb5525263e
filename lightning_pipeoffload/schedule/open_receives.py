"""Which messages a rank has a receive open for: of each edge at most one.

NCCL receives in a kernel that ends when its message has come. A second one of the same edge would
wait on the device behind the first, before all that shares a hardware queue with it, and what
waits for the whole device waits for both. So the next one is posted when the first is taken, and
no sooner than its message can come whatever this rank does next::

    rank 0   F0 SEND_F0 F1 SEND_F1      F2 SEND_F2
    rank 1   [ RECV_F0 ]  F0  [ RECV_F1 ]  F1  [ RECV_F2 ]
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator

from .actions import Action
from .messages import RECVS, send_of, sends_before
from .schedule import Schedule

__all__ = ["OpenReceives"]


class OpenReceives:
    """The receives of one rank in one step.

    Args:
        plan: A lowered plan.
        rank: The rank.
        post: Called with each receive when it is posted, and with the rank that its message is of.
    """

    def __init__(self, plan: Schedule, rank: int, post: Callable[[Action, int], None]) -> None:
        receives = [action for action in plan[rank] if action.kind in RECVS]
        self._sources = {receive: plan.rank_of(send_of(receive).stage) for receive in receives}
        self._sends_before = sends_before(plan, rank)
        self._post = post
        self.start_step()

    def start_step(self) -> None:
        """Start a step: nothing is sent or received."""
        self._num_sent = 0
        self._open: dict[int, Action] = {}
        self._coming: defaultdict[int, deque[Action]] = defaultdict(deque)
        self._reached: set[Action] = set()

    def expect(self, actions: Iterable[Action]) -> None:
        """Receive what is received in the next actions, each edge's messages in this order."""
        for action in actions:
            if action.kind in RECVS:
                self._coming[self._sources[action]].append(action)

    def count_send(self) -> None:
        """Count a SEND, from which messages may follow."""
        self._num_sent += 1
        for source in self._coming:
            self._post_next(source)

    def reach(self, receive: Action) -> None:
        """Come to a RECV of the plan, whose message can come from then on."""
        self._reached.add(receive)
        self._post_next(self._sources[receive])

    def until(self, receive: Action) -> Iterator[Action]:
        """Yield the messages of its edge to wait for, in order, up to that of a receive."""
        source, taken = self._sources[receive], None
        while taken != receive:
            if source not in self._open:
                self._post_first(source)
            taken = self._open.pop(source)
            yield taken
            self._post_next(source)

    def rest(self) -> Iterator[Action]:
        """Yield all messages that are expected still, to wait for."""
        for source, coming in self._coming.items():
            last = coming[-1] if coming else self._open.get(source)
            if last is not None:
                yield from self.until(last)

    def _post_next(self, source: int) -> None:
        coming = self._coming[source]
        if coming and source not in self._open:
            follows = self._sends_before[coming[0]] <= self._num_sent
            if follows or coming[0] in self._reached:
                self._post_first(source)

    def _post_first(self, source: int) -> None:
        receive = self._open[source] = self._coming[source].popleft()
        self._post(receive, source)

"""The messages of one rank: outputs and gradients, from the stage that makes them to its neighbour.

A message is named by an action at either end: the output of ``1F0`` is sent by ``1SEND_F0`` and
taken by ``2F0``, for which ``2RECV_F0`` waits. Between two stages of one rank there is no SEND and
no RECV, and the message waits here::

    put(1F0) -> [1SEND_F0] -> send     transport     post, wait -> [2RECV_F0]  -> receive(2F0)
    put(1F0) -> [2RECV_F0] -> receive(2F0)              where both stages are of this rank

Which tensors a message has is decided in the trace, alike on every rank:
:meth:`StepRecord.message_specs_before`. ``StageRunner`` collects them, and ``StagePass`` enters
them into the next stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_pipeoffload.runtime import TensorSpec
from lightning_pipeoffload.runtime.comm import ProfiledTransport, Transport
from lightning_pipeoffload.runtime.device import ActionTimer, is_profiled
from lightning_pipeoffload.schedule import (
    SENDS,
    Action,
    Costs,
    Kind,
    OpenReceives,
    PendingSends,
    Schedule,
    lower,
    max_pending_sends,
    receives_to_post,
    recv_of,
    send_after,
)

_EXCHANGING = {Kind.F, Kind.B, Kind.BW}


class _ActionMessages(NamedTuple):
    """The messages at both ends of an F, B or BW; None: there is no such stage."""

    needed: Action | None
    receiver: Action | None


class Mailbox:
    """The messages of one rank in one step.

    Args:
        transport: Sends and receives messages.
        specs_of: Describes the tensors of the message that a RECV waits for.

    Attributes:
        receives: The receives of the plan in use.
    """

    def __init__(
        self, transport: Transport, specs_of: Callable[[Action], list[TensorSpec]]
    ) -> None:
        self.transport = self._transport_of_plan = transport
        self._specs_of = specs_of
        self._messages: dict[Action, list[Tensor]] = {}  # by the SEND or RECV that comes next
        self._schedule: Schedule | None = None
        self._most_pending: dict[int, int] = {}

    def set_transport(self, transport: Transport) -> None:
        """Send and receive by another transport from the next plan on."""
        self.transport = transport

    def limit_pending_sends(self, schedule: Schedule, rank: int) -> None:
        """Limit pending messages to the number that a training schedule, or its plan, needs."""
        if schedule is not self._schedule:  # by identity: comparing all actions takes time
            self._schedule = schedule
            self._most_pending.clear()
            plan = schedule if schedule.has_transfers else lower(schedule)
            self._most_pending.update(max_pending_sends(plan, rank))

    def use_plan(self, plan: Schedule, rank: int, costs: Costs) -> None:
        """Exchange the messages of another plan; ``costs`` decide when receives are posted."""
        self._plan = plan
        self._transport_of_plan = (
            ProfiledTransport(self.transport) if is_profiled() else self.transport
        )
        self._ends = {a: self._messages_of(a) for a in plan[rank] if a.kind in _EXCHANGING}
        sends = (action for action in plan[rank] if action.kind in SENDS)
        self._peers = {send: plan.rank_of(recv_of(send).stage) for send in sends}
        self.receives = OpenReceives(plan, rank, self._post, receives_to_post(plan, rank, costs))
        self._sends = PendingSends(
            plan, rank, self._transport_of_plan.drain_sends, self._most_pending
        )

    def _messages_of(self, action: Action) -> _ActionMessages:
        first, last, receives, sends = 0, self._plan.num_stages - 1, Kind.RECV_F, Kind.SEND_F
        if action.kind is not Kind.F:
            first, last, receives, sends = last, first, Kind.RECV_B, Kind.SEND_B
        needed = None if action.stage == first else action._replace(kind=receives)
        if action.stage == last:
            return _ActionMessages(needed, None)
        send = action._replace(kind=sends)
        is_sent = send_after(self._plan, action) is not None
        return _ActionMessages(needed, send if is_sent else recv_of(send))

    def start_step(self) -> None:
        """Start a step: nothing is sent or received."""
        self.receives.start_step()
        self._sends.start_step()
        self._messages.clear()

    def expect_messages(self, actions: Sequence[Action]) -> None:
        """Expect the messages of the next actions; each edge delivers them in this order."""
        self.receives.queue_receives(actions)

    def post(self, receive: Action) -> None:
        """Post a receive if it is not posted yet, without waiting; :meth:`receive` waits."""
        self.receives.mark_reached(receive)

    def _post(self, receive: Action, peer: int) -> None:
        self._transport_of_plan.post(receive, peer, self._specs_of(receive))

    def receive(self, action: Action, timer: ActionTimer) -> list[Tensor]:
        """Wait for the message that an F or B needs, and return its tensors.

        Messages that come before it in the plan are received first, and kept. The list is empty for
        an F of the first stage and a B of the last one. ``timer`` is paused during the wait.
        """
        needed = self._ends[action].needed
        if needed is None:
            return []
        if needed not in self._messages:
            timer.pause()
            for receive in self.receives.pop_receives_up_to(needed):
                self._messages[receive] = self._transport_of_plan.wait(receive)
                self._sends.release_delivered(receive)
            timer.resume()
        return self._messages.pop(needed)

    def put(self, action: Action, tensors: list[Tensor]) -> bool:
        """Keep the result of an F or B for its next stage; return False if no stage follows."""
        receiver = self._ends[action].receiver
        if receiver is None:
            return False
        self._messages[receiver] = tensors
        return True

    def send(self, send: Action) -> None:
        """Send a message."""
        peer = self._peers[send]
        self._sends.add(peer)
        self._transport_of_plan.send(send, peer, self._messages.pop(send))
        self.receives.count_send()

    def end_step(self) -> None:
        """End a step: free the received messages."""
        self._sends.end_step()
        self.transport.free_unused_buffers()

    def discard_forwards(self) -> None:
        """Undo this step's messages, after receiving those that the peers have sent."""
        for receive in self.receives.pop_remaining_receives():
            self.transport.wait(receive)
        self._sends.release_all()
        self.start_step()

    def abandon(self) -> None:
        """Drop the messages of an unfinished step."""
        self._messages.clear()

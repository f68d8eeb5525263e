"""What one rank sends and receives in a step: when it is posted, sent, taken and let go of.

A message is posted as early as it can have been sent; who needs it waits for it::

    plan      RECV_F    F         SEND_F    RECV_B    B         SEND_B
    messages  posted -> taken     sent ->   posted -> taken     sent ->
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from torch import Tensor

from lightning_pipeoffload.runtime.step.batch_slice import Microbatch
from lightning_pipeoffload.runtime.step.stage import StageRunner
from lightning_pipeoffload.runtime.timing import ActionTimer
from lightning_pipeoffload.runtime.transport import Transport
from lightning_pipeoffload.schedule import Action, Kind, Schedule
from lightning_pipeoffload.schedule.messages import RECVS, arrived_before, recv_of, sends_before


class RankMessages:
    """The messages of one rank, step after step.

    Args:
        timer: Measures the actions, and leaves out what they wait for.

    Attributes:
        timer: The same; another may take its place between two steps.
    """

    def __init__(self, timer: ActionTimer) -> None:
        self.timer = timer
        self._inbox: dict[Action, list[Tensor]] = {}
        self._outbox: dict[Action, list[Tensor]] = {}

    def use(self, plan: Schedule, rank: int) -> None:
        """Send and receive what another plan says, from the next step on."""
        self._plan = plan
        self._arrived_before = arrived_before(plan, rank)
        self._sends_before = sends_before(plan, rank)

    def start_step(self, transport: Transport, stages: Mapping[int, StageRunner]) -> None:
        """Start a step, or start it anew.

        Args:
            transport: Moves messages to and from the other ranks.
            stages: The stages of the rank, by index.
        """
        self._transport, self._stages = transport, stages
        self._num_sent = 0
        self.forget()

    def forget(self) -> None:
        """Keep nothing that has not been sent or taken."""
        self._inbox.clear()
        self._outbox.clear()

    def expect(self, actions: Iterable[Action], microbatches: Mapping[int, Microbatch]) -> None:
        """Learn what the next actions receive, and of which microbatches."""
        self._microbatches = microbatches
        receives = (action for action in actions if action.kind in RECVS)
        # Sorting is stable, so that each edge's messages stay in the order in which they are sent.
        self._to_receive = deque(sorted(receives, key=self._sends_before.__getitem__))

    def pass_on(self, send: Action, tensors: list[Tensor]) -> None:
        """Put a result where its SEND finds it, or right into the inbox of a stage of this rank."""
        receive = recv_of(send)
        if receive.stage in self._stages:
            self._inbox[receive] = tensors
        else:
            self._outbox[send] = tensors

    def take(self, receive: Action) -> list[Tensor]:
        """Return a message, once it is there."""
        handed_over = self._inbox.pop(receive, None)
        if handed_over is not None:
            return handed_over
        self.timer.pause()
        tensors = self._transport.wait(receive)
        # The peer has waited for these before it sent this message.
        for send in self._arrived_before.get(receive, ()):
            self._transport.release(send)
        self.timer.resume()
        return tensors

    def send(self, action: Action) -> None:
        """Send what was passed on."""
        peer = self._plan.rank_of(recv_of(action).stage)
        self._transport.send(action, peer, self._outbox.pop(action))
        self._num_sent += 1
        self._post_what_follows(self._num_sent)

    def receive(self, action: Action) -> None:
        """See that the message can arrive; the F or B that needs it waits for it."""
        self._post_what_follows(max(self._num_sent, self._sends_before[action]))

    def _post_what_follows(self, num_sent: int) -> None:
        """Post the messages that follow from no more than so many sends of this rank.

        Not sooner: NCCL receives in a kernel, and loading another kernel for the first time waits
        for that one, which would wait for what this rank has yet to send. Nor does memory wait for
        what cannot come yet.
        """
        while self._to_receive and self._sends_before[self._to_receive[0]] <= num_sent:
            self._post(self._to_receive.popleft())

    def _post(self, action: Action) -> None:
        microbatch = self._microbatches[action.microbatch]
        if action.kind is Kind.RECV_F:
            specs = self._stages[action.stage].payload_in(microbatch)
            self._transport.post(action, self._plan.rank_of(action.stage - 1), specs)
        else:
            sent = self._stages[action.stage].payload_out(microbatch)
            specs = [spec for spec in sent if spec.gets_gradient]
            self._transport.post(action, self._plan.rank_of(action.stage + 1), specs)

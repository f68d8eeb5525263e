"""What one rank sends and receives in a step: when it is posted, sent, taken and let go of.

A message is received as soon as its edge is free for it; who needs it waits for it::

    plan      RECV_F    F         SEND_F    RECV_B    B         SEND_B
    messages  posted -> taken     sent ->   posted -> taken     sent ->
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from lightning_pipeoffload.runtime.step.batch_slice import Microbatch
from lightning_pipeoffload.runtime.step.stage import StageRunner
from lightning_pipeoffload.runtime.timing import ActionTimer
from lightning_pipeoffload.runtime.transport import Transport
from lightning_pipeoffload.schedule import Action, Kind, Schedule
from lightning_pipeoffload.schedule.messages import OpenReceives, arrived_before, recv_of


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
        self._receives = OpenReceives(plan, rank, self._post)

    def start_step(self, transport: Transport, stages: Mapping[int, StageRunner]) -> None:
        """Start a step.

        Args:
            transport: Moves messages to and from the other ranks.
            stages: The stages of the rank, by index.
        """
        self._transport, self._stages = transport, stages
        self._receives.start_step()
        self.forget()

    def forget(self) -> None:
        """Keep nothing that has not been sent or taken."""
        self._inbox.clear()
        self._outbox.clear()

    def take_back(self) -> None:
        """Start the step anew, as all ranks do, once what they have sent in it has come."""
        for receive in self._receives.rest():
            self._transport.wait(receive)
        self._transport.take_back()
        self.start_step(self._transport, self._stages)

    def expect(self, actions: Iterable[Action], microbatches: Mapping[int, Microbatch]) -> None:
        """Learn what the next actions receive, and of which microbatches."""
        self._microbatches = microbatches
        self._receives.expect(actions)

    def pass_on(self, send: Action, tensors: list[Tensor]) -> None:
        """Put a result where its SEND finds it, or right into the inbox of a stage of this rank."""
        receive = recv_of(send)
        if receive.stage in self._stages:
            self._inbox[receive] = tensors
        else:
            self._outbox[send] = tensors

    def take(self, receive: Action) -> list[Tensor]:
        """Return a message, once it is there; those before it on its edge come with it."""
        if receive not in self._inbox:
            self.timer.pause()
            for taken in self._receives.until(receive):
                self._inbox[taken] = self._transport.wait(taken)
                # The peer has waited for these before it sent this message.
                for send in self._arrived_before.get(taken, ()):
                    self._transport.release(send)
            self.timer.resume()
        return self._inbox.pop(receive)

    def send(self, action: Action) -> None:
        """Send what was passed on."""
        peer = self._plan.rank_of(recv_of(action).stage)
        self._transport.send(action, peer, self._outbox.pop(action))
        self._receives.count_send()

    def receive(self, action: Action) -> None:
        """See that the message can come; the F or B that needs it waits for it."""
        self._receives.reach(action)

    def _post(self, action: Action, peer: int) -> None:
        microbatch, stage = self._microbatches[action.microbatch], self._stages[action.stage]
        if action.kind is Kind.RECV_F:
            specs = stage.payload_in(microbatch)
        else:
            specs = [spec for spec in stage.payload_out(microbatch) if spec.gets_gradient]
        self._transport.post(action, peer, specs)

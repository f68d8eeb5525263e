"""The memory of messages on their way is what an executor's transport holds at a time."""

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.schedule import build, lower, peak_message_memory
from tests.support.small_modules import Regression


class Counting:
    """A rank's end of a transport, which counts the messages that it has memory for."""

    def __init__(self, transport):
        self.transport = transport
        self.held = self.most = 0
        self.sent = set()

    def post(self, receive, peer, specs):
        self.add(1)
        self.transport.post(receive, peer, specs)

    def send(self, send, peer, tensors):
        self.sent.add(send)
        self.add(1)
        self.transport.send(send, peer, tensors)

    def wait(self, receive):
        self.held -= 1
        return self.transport.wait(receive)

    def release(self, send):
        self.held -= send in self.sent
        self.sent.discard(send)

    def finish_step(self):
        pass

    def add(self, count):
        self.held += count
        self.most = max(self.most, self.held)


@pytest.mark.parametrize(
    ("schedule", "num_ranks"), [("gpipe", 2), ("1f1b", 3), ("zb_h1", 3), ("zb_v", 2), ("po_h", 2)]
)
def test_messages_are_counted_as_a_transport_holds_them(schedule, num_ranks):
    plan = build(schedule, num_ranks, 4)
    module = Regression([nn.Linear(4, 4) for _ in range(6)])
    pipeline = InProcessPipeline(module, plan, lambda model, x: model(x).square().mean())
    counts = [Counting(executor.transport) for executor in pipeline.executors]
    for executor, counting in zip(pipeline.executors, counts, strict=True):
        executor.transport = counting
    pipeline.run(torch.randn(8, 4), 2)
    assert [c.most for c in counts] == [*peak_message_memory(lower(plan), lambda send: 1)]

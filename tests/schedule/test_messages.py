"""Which messages follow from which, which receives are open, and what may run ahead of a step."""

from collections import Counter

import pytest
import torch
from torch import nn

from lightning_pipeoffload.schedule import (
    RECVS,
    SENDS,
    Action,
    Kind,
    OpenReceives,
    build,
    forward_only,
    lower,
    peak_message_memory,
    recv_before,
    recv_of,
    send_of,
    speculative_actions,
)
from lightning_pipeoffload.schedule.messages import delivered_sends_by_recv, num_required_sends
from tests.support.in_process import InProcessPipeline
from tests.support.plans import SHAPES
from tests.support.small_modules import Regression


def test_messages_tell_of_those_before_them():
    plan = lower(build("1f1b", 2, 3))
    told = {Action(Kind.RECV_B, 0, m): [Action(Kind.SEND_F, 0, m)] for m in range(3)}
    assert delivered_sends_by_recv(plan, 0) == told
    # What the ranks behind have waited for; what went round over other ranks.
    for name, kind, stage, sent in [
        ("1f1b", Kind.RECV_B, 0, [2, 3, 3]),
        ("interleaved_1f1b", Kind.RECV_F, 3, [1, 2, 3]),
    ]:
        follows = num_required_sends(lower(build(name, 3, 3)))
        assert [follows[Action(kind, stage, m)] for m in range(3)] == sent


@pytest.mark.parametrize("name", SHAPES)
def test_the_peer_had_what_it_is_said_to_have_had(name):
    plan = lower(build(name, 4, 8))
    for rank in range(4):
        for receive, sends in delivered_sends_by_recv(plan, rank).items():
            answer = send_of(receive)
            peer = plan[plan.rank_of(answer.stage)]
            before = peer[: peer.index(answer)]
            waited_for = {send_of(r) for r in (recv_before(plan, a) for a in before) if r}
            assert waited_for.issuperset(sends)


class Edges:
    """What one rank has open and has taken, edge by edge."""

    def __init__(self, plan, rank):
        self.follows, self.num_sent = num_required_sends(plan), 0
        self.open, self.taken = {}, set()
        self.receives = OpenReceives(plan, rank, self.post)
        self.receives.queue_receives(plan[rank])

    def post(self, receive, source):
        assert source not in self.open
        assert self.follows[receive] <= self.num_sent
        self.open[source] = receive

    def run(self, plan, action):
        needed = recv_before(plan, action)
        if action.kind in SENDS:
            self.num_sent += 1
            self.receives.count_send()
        elif action.kind in RECVS:
            self.receives.mark_reached(action)
        elif needed and needed not in self.taken:
            self.take(plan, self.receives.pop_receives_up_to(needed))
            assert needed in self.taken

    def take(self, plan, receives):
        for receive in receives:
            assert self.open.pop(plan.rank_of(send_of(receive).stage)) == receive
            self.taken.add(receive)


@pytest.mark.parametrize("name", SHAPES)
def test_an_edge_has_one_open_receive_whose_message_is_on_its_way(name):
    plan = lower(build(name, 4, 8))
    for rank, actions in enumerate(plan):
        edges = Edges(plan, rank)
        for action in actions:
            edges.run(plan, action)
        assert edges.taken == {action for action in actions if action.kind in RECVS}
        assert not edges.open


def test_what_is_expected_still_comes_in_the_order_of_each_edge():
    plan = lower(build("zb_v", 2, 4))
    edges = Edges(plan, 1)
    edges.num_sent = 8
    edges.receives.mark_reached(next(action for action in plan[1] if action.kind in RECVS))
    edges.take(plan, edges.receives.pop_remaining_receives())
    assert edges.taken == {action for action in plan[1] if action.kind in RECVS}


class Counting:
    """A rank's end of a transport, which counts the messages that it has memory for."""

    def __init__(self, transport):
        self.transport = transport
        self.held = self.most = 0
        self.sent = Counter()

    def post(self, receive, peer, specs):
        self.add(1)
        self.transport.post(receive, peer, specs)

    def send(self, send, peer, tensors):
        self.sent[peer] += 1
        self.add(1)
        self.transport.send(send, peer, tensors)

    def wait(self, receive):
        self.held -= 1
        return self.transport.wait(receive)

    def drain_sends(self, peer, left):
        ended = max(0, self.sent[peer] - left)
        self.sent[peer] -= ended
        self.held -= ended

    def free_unused_buffers(self):
        pass

    def add(self, count):
        self.held += count
        self.most = max(self.most, self.held)


@pytest.mark.parametrize(("schedule", "num_ranks"), [("gpipe", 2), ("zb_h1", 3), ("po_h", 2)])
def test_messages_are_counted_as_a_transport_holds_them(schedule, num_ranks):
    plan = build(schedule, num_ranks, 4)
    module = Regression([nn.Linear(4, 4) for _ in range(6)])
    pipeline = InProcessPipeline(module, plan, lambda model, x: model(x).square().mean())
    counts = [Counting(executor.transport) for executor in pipeline.executors]
    for executor, counting in zip(pipeline.executors, counts, strict=True):
        executor.mailbox.transport = counting
    for _ in range(2):
        pipeline.run(torch.randn(8, 4), 2)
    assert [c.most for c in counts] == [*peak_message_memory(lower(plan), lambda send: 1)]


@pytest.mark.parametrize("name", [*SHAPES, "interleaved_1f1b", "v_half"])
def test_evaluations_need_no_more_messages_than_training(name):
    plan = lower(build(name, 4, 16))
    evaluated = peak_message_memory(plan, lambda send: 1, lower(forward_only(plan)))
    assert evaluated == peak_message_memory(plan, lambda send: 1)


# What may run before the step before has ended everywhere, and can run again.


def test_each_rank_goes_as_far_as_its_first_backward_and_the_last_stage_waits():
    found = speculative_actions(lower(build("1f1b", 3, 6)))
    forwards = [[a.microbatch for a in actions if a.kind is Kind.F] for actions in found]
    assert forwards == [[0, 1, 2], [0, 1], []]


@pytest.mark.parametrize("name", [*SHAPES, "v_half"])
def test_no_message_of_what_runs_ahead_is_left_and_nothing_is_missing(name):
    plan = lower(build(name, 2, 4))
    found = speculative_actions(plan)
    sent = {recv_of(a) for actions in found for a in actions if a.kind in SENDS}
    received = {a for actions in found for a in actions if a.kind in RECVS}
    assert sent == received
    for rank, actions in enumerate(found):
        done = set()
        for action in actions:
            assert action.kind in (Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.OFFLOAD)
            if action.kind is Kind.F:
                assert action.stage < plan.num_stages - 1
                needed = recv_before(plan, action)
                before = Action(Kind.F, action.stage - 1, action.microbatch)
                assert needed in done or before in done or action.stage == 0
            done.add(action)
        ran = [action for action in actions if action.kind not in RECVS]
        assert ran == [a for a in plan[rank] if a in done and a.kind not in RECVS]

import pytest

from lightning_pipeoffload.schedule import SCHEDULES, build, lower
from lightning_pipeoffload.schedule.messages import (
    RECVS,
    SENDS,
    OpenReceives,
    recv_before,
    send_of,
    sends_before,
)


class Edges:
    """What one rank has open and has taken, edge by edge."""

    def __init__(self, plan, rank):
        self.follows, self.num_sent = sends_before(plan, rank), 0
        self.open, self.taken = {}, set()
        self.receives = OpenReceives(plan, rank, self.post)
        self.receives.expect(plan[rank])

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
            self.receives.reach(action)
        elif needed and needed not in self.taken:
            self.take(plan, self.receives.until(needed))
            assert needed in self.taken

    def take(self, plan, receives):
        for receive in receives:
            assert self.open.pop(plan.rank_of(send_of(receive).stage)) == receive
            self.taken.add(receive)


@pytest.mark.parametrize("name", SCHEDULES)
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
    edges.receives.reach(next(action for action in plan[1] if action.kind in RECVS))
    edges.take(plan, edges.receives.rest())
    assert edges.taken == {action for action in plan[1] if action.kind in RECVS}

import pytest

from lightning_pipeoffload.schedule import SCHEDULES, Action, Kind, build, lower
from lightning_pipeoffload.schedule.messages import (
    RECVS,
    SENDS,
    arrived_before,
    recv_before,
    send_of,
    sends_before,
)


def test_what_a_gradient_tells():
    told = arrived_before(lower(build("1f1b", 2, 3)), 0)
    expected = {Action(Kind.RECV_B, 0, m): [Action(Kind.SEND_F, 0, m)] for m in range(3)}
    assert told == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_peer_had_what_it_is_said_to_have_had(name):
    plan = lower(build(name, 4, 8))
    for rank in range(4):
        for receive, sends in arrived_before(plan, rank).items():
            answer = send_of(receive)
            peer = plan[plan.rank_of(answer.stage)]
            before = peer[: peer.index(answer)]
            waited_for = {send_of(r) for r in (recv_before(plan, a) for a in before) if r}
            assert waited_for.issuperset(sends)


def test_a_gradient_follows_from_all_that_the_ranks_behind_waited_for():
    follows = sends_before(lower(build("1f1b", 3, 3)), 0)
    assert [follows[Action(Kind.RECV_B, 0, m)] for m in range(3)] == [2, 3, 3]


def test_a_message_follows_from_what_went_round_over_other_ranks():
    plan = lower(build("interleaved_1f1b", 3, 3))
    round_again = [sends_before(plan, 0)[Action(Kind.RECV_F, 3, m)] for m in range(3)]
    assert round_again == [1, 2, 3]


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_follow_from_sends_before_them_and_in_the_order_of_each_edge(name):
    plan = lower(build(name, 4, 8))
    for rank, actions in enumerate(plan):
        follows, num_sent, latest = sends_before(plan, rank), 0, dict.fromkeys(range(4), 0)
        for action in actions:
            num_sent += action.kind in SENDS
            if action.kind in RECVS:
                sender = plan.rank_of(send_of(action).stage)
                assert latest[sender] <= follows[action] <= num_sent
                latest[sender] = follows[action]

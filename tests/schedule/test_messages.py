import pytest

from lightning_pipeoffload.schedule import SCHEDULES, Action, Kind, build, lower
from lightning_pipeoffload.schedule.messages import arrived_before, recv_before, send_of


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

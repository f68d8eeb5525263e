"""What may run before the step before has ended everywhere, and can run again."""

from __future__ import annotations

import pytest

from lightning_pipeoffload.schedule import Action, Kind, build, lower
from lightning_pipeoffload.schedule.ahead import actions_ahead
from lightning_pipeoffload.schedule.messages import RECVS, SENDS, recv_before, recv_of

NAMES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zb_v", "v_half", "uniform"]


def names_of(actions):
    return " ".join(f"{action.kind.value}{action.microbatch}" for action in actions)


def test_each_rank_goes_as_far_as_its_first_backward_and_the_last_stage_waits():
    found = actions_ahead(lower(build("1f1b", 3, 6)))
    assert [names_of(a for a in actions if a.kind is Kind.F) for actions in found] == [
        "F0 F1 F2",
        "F0 F1",
        "",
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [(2, 4), (4, 8)], ids=str)
def test_no_message_is_left_and_nothing_is_missing(name, size):
    plan = lower(build(name, *size))
    found = actions_ahead(plan)
    sent = {recv_of(a) for actions in found for a in actions if a.kind in SENDS}
    received = {a for actions in found for a in actions if a.kind in RECVS}
    assert sent == received
    for rank, actions in enumerate(found):
        done = set()
        for action in actions:
            if action.kind is Kind.F:
                assert action.stage < plan.num_stages - 1
                needed = recv_before(plan, action)
                before = Action(Kind.F, action.stage - 1, action.microbatch)
                assert needed in done or before in done or action.stage == 0
            done.add(action)
        assert done <= {*plan[rank]}
        in_plan = [action for action in plan[rank] if action in done]
        assert [a for a in actions if a.kind not in RECVS] == [
            a for a in in_plan if a.kind not in RECVS
        ]


def test_the_host_is_not_waited_for():
    plan = lower(build("po_f", 4, 8))
    kinds = {action.kind for actions in actions_ahead(plan) for action in actions}
    assert kinds <= {Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.OFFLOAD}

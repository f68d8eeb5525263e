"""When receives are posted: neither long before their messages, nor so late that anything waits."""

import pytest

from examples.benchmarks.open_receives import Devices
from lightning_pipeoffload.schedule import (
    COMPUTE,
    RECVS,
    Action,
    Costs,
    build,
    forward_only,
    lower,
    receives_to_post,
    recv_before,
)
from tests.support.plans import SHAPES


def test_a_receive_is_posted_with_the_action_during_which_it_is_sent():
    plan = lower(build("1f1b", 2, 3))
    found = receives_to_post(plan, 0, Costs.unit())
    told = {str(action): [*map(str, receives)] for action, receives in found.items()}
    # rank 0   F0 F1 .  BW0 BW0 F2 BW1 BW1 BW2
    # rank 1   .  F0 B0 W0  F1  B1 W1  F2  B2
    assert told == {"0F1": ["0RECV_B0"], "0F2": ["0RECV_B1"], "0BW1": ["0RECV_B2"]}


@pytest.mark.parametrize("name", SHAPES)
def test_every_receive_is_expected_before_the_action_that_needs_it(name):
    plan = lower(build(name, 4, 8))
    for each in (plan, lower(forward_only(plan))):
        for rank, actions in enumerate(each):
            own = [action for action in actions if action.kind in COMPUTE]
            found = receives_to_post(each, rank, Costs.unit())
            place = {r: own.index(action) for action in found for r in found[action]}
            assert place.keys() == {action for action in actions if action.kind in RECVS}
            for number, action in enumerate(own):
                needed = recv_before(each, action)
                assert needed is None or place[needed] < max(1, number)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v", "interleaved_1f1b"])
def test_fewer_kernels_spin_during_computation_and_no_step_takes_longer(name):
    plan = lower(build(name, 4, 8))

    def seconds(action: Action) -> float:
        return 2.0 * len(action.kind.value) - action.microbatch % 2 / 5

    (before, kernels, two), (after, fewer, two_after) = (
        Devices(plan, seconds, 0.1, early).run() for early in (True, False)
    )
    assert after <= before * 1.001
    assert fewer < 0.8 * kernels
    assert two_after <= two

"""How long a rank that is rehearsed alone waits for the messages of others."""

import pytest

from lightning_pipeoffload.cli.rehearsal import receive_waits
from lightning_pipeoffload.schedule import (
    Costs,
    build,
    lower,
    receives_to_post,
    recv_before,
    simulate,
)


def test_a_receive_is_open_from_where_it_is_posted_until_its_message_is_sent():
    plan = lower(build("1f1b", 2, 3))
    # rank 0   F0 F1 .  BW0 BW0 F2 BW1 BW1 BW2   RECV_B0 is posted at 1, and B0 ends at 3
    # rank 1   .  F0 B0 W0  F1  B1 W1  F2  B2
    assert [*receive_waits(plan, 0, Costs.unit()).values()] == [2, 1, 3]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_v"])
def test_messages_that_come_so_keep_the_rank_in_its_plan(name):
    plan, costs = lower(build(name, 4, 8)), Costs(1.0, 1.2, 0.8)
    events = {event.action: event for event in simulate(plan, costs).events}
    for rank, actions in enumerate(plan):
        waits, expected = receive_waits(plan, rank, costs), receives_to_post(plan, rank, costs)
        posted = {r: events[a].start for a, receives in expected.items() for r in receives}
        for action in actions:
            receive = recv_before(plan, action)
            if receive is not None and waits[receive] > 0:
                # It may be posted later, where the message before it is taken.
                assert posted[receive] + waits[receive] <= events[action].start + 1e-9

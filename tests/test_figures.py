import pytest

from lightning_pipeoffload.figures import messages_sent
from lightning_pipeoffload.schedule import TRANSFERS, Kind, build, lower


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b", "uniform"])
def test_messages_are_the_sends_of_the_plan(name):
    schedule = build(name, 4, 8)
    sends = TRANSFERS - {Kind.RECV_F, Kind.RECV_B}
    planned = [sum(action.kind in sends for action in rank) for rank in lower(schedule)]
    assert list(messages_sent(schedule)) == planned

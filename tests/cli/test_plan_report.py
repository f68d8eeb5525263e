import pytest

from lightning_pipeoffload.cli.planned_steps import messages_sent
from lightning_pipeoffload.schedule import build, lower
from lightning_pipeoffload.schedule.messages import SENDS


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b", "uniform"])
def test_messages_are_the_sends_of_the_plan(name):
    schedule = build(name, 4, 8)
    planned = [sum(action.kind in SENDS for action in rank) for rank in lower(schedule)]
    assert list(messages_sent(schedule)) == planned

import pytest

from lightning_pipeoffload.schedule import (
    HOST_EFFECTS,
    MEMORY_EFFECTS,
    Action,
    Kind,
    MemoryEffect,
    Part,
    ScheduleError,
)


def test_an_action_prints_stage_kind_and_microbatch():
    assert str(Action(Kind.F, 2, 0)) == "2F0"
    assert f"{Action(Kind.SEND_F, 10, 31)}" == "10SEND_F31"


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_prints_and_parses(kind):
    action = Action(kind, 12, 345)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "2F", "F0", "2f0", "2I0", "2F0x", "-1F0"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="is no action; write stage, kind and microbatch"):
        Action.parse(text)


def test_actions_are_hashable_and_equal_by_value():
    assert {Action(Kind.F, 2, 0)} == {Action.parse("2F0")}


LIVES = [
    "F BW",
    "F B W",
    "F OFFLOAD FREE RELOAD BW",
    "F OFFLOAD FREE RELOAD B W",
    "F OFFLOAD FREE RELOAD_B B RELOAD_W W",
    "F OFFLOAD FREE RELOAD_B B OFFLOAD_W FREE_W RELOAD_W W",
    "F B OFFLOAD_W FREE_W RELOAD_W W",
]


@pytest.mark.parametrize("effects", [MEMORY_EFFECTS, HOST_EFFECTS])
@pytest.mark.parametrize("life", LIVES)
def test_a_life_takes_all_its_memory_back(life, effects):
    there = Part(0)
    for name in life.split():
        effect = effects.get(Kind[name], MemoryEffect())
        there = there & ~effect.drops | effect.puts
    assert not there

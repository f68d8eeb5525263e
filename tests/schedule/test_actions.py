import pytest

from lightning_pipeoffload.schedule import MEMORY_EFFECTS, Action, Kind, ScheduleError


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


@pytest.mark.parametrize("life", ["F BW", "F B W", "F FREE RELOAD B W"])
def test_a_life_takes_all_its_memory_back(life):
    effects = [MEMORY_EFFECTS[Kind[name]] for name in life.split()]
    assert [sum(parts) for parts in zip(*effects, strict=True)] == [0, 0]

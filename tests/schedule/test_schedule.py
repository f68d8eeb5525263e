"""Actions and schedules print, are read back, and say where a stage is."""

import pickle
from itertools import pairwise

import pytest

from lightning_pipeoffload.schedule import (
    HOST_EFFECTS,
    KINDS,
    MEMORY_EFFECTS,
    Action,
    Costs,
    Kind,
    MemoryEffect,
    MemoryPart,
    Schedule,
    ScheduleError,
    accumulates_in_same_order,
    add_final_actions,
    build,
    lower,
    offload_activations,
    stages_on,
    validate,
)
from lightning_pipeoffload.schedule.schedule import loop_placement, v_placement
from tests.support.plans import SHAPES, plan

TWO_RANKS = "0F0 0F1 0BW0 0BW1\n1F0 1BW0 1F1 1BW1"


@pytest.mark.parametrize("kind", Kind)
def test_every_kind_prints_and_parses(kind):
    action = Action(kind, 12, 345)
    assert f"{action}" == f"12{kind.value}345"
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "2F", "F0", "2f0", "2I0", "2F0x", "-1F0"])
def test_what_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError, match="is no action; write stage, kind and microbatch"):
        Action.parse(text)


LIVES = [
    "F BW",
    "F B W",
    "F OFFLOAD FREE RELOAD BW",
    "F OFFLOAD FREE RELOAD B W",
    "F OFFLOAD FREE RELOAD_B B RELOAD_W W",
    "F OFFLOAD FREE RELOAD_B B OFFLOAD_W FREE_W RELOAD_W W",
    "F B OFFLOAD_W FREE_W RELOAD_W W",
]


def test_each_kind_comes_after_each_that_it_may_follow_in_a_life():
    """So what is added to the table is tried below."""
    lives = [[Kind[name] for name in life.split()] for life in LIVES]
    found = {pair for life in lives for pair in pairwise(life)}
    assert found == {(before, kind) for kind, row in KINDS.items() for before in row.follows}


@pytest.mark.parametrize("life", LIVES)
def test_a_life_is_valid(life):
    validate(plan(" ".join(f"0{name}0" for name in life.split())))


@pytest.mark.parametrize("effects", [MEMORY_EFFECTS, HOST_EFFECTS])
@pytest.mark.parametrize("life", LIVES)
def test_a_life_takes_all_its_memory_back(life, effects):
    there = MemoryPart(0)
    for name in life.split():
        effect = effects.get(Kind[name], MemoryEffect())
        there = there & ~effect.drops | effect.puts
    assert not there


def test_sizes_and_placement_are_read_off_the_actions():
    schedule = build("interleaved_1f1b", num_ranks=4, num_microbatches=8, num_chunks=3)
    sizes = (schedule.num_ranks, schedule.num_stages, schedule.num_chunks)
    assert (*sizes, schedule.num_microbatches) == (4, 12, 3, 8)
    assert schedule.stages_of(1) == (1, 5, 9)
    assert [schedule.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert str(plan(TWO_RANKS)) == TWO_RANKS
    assert schedule == Schedule(schedule.actions) != build("gpipe", 4, 8)
    assert hash(schedule) == hash(Schedule(schedule.actions))  # whose name does not count


def test_placements():
    assert loop_placement(3, 2) == (0, 1, 2, 0, 1, 2)
    assert v_placement(3) == (0, 1, 2, 2, 1, 0)
    assert v_placement(2, 3) == (0, 1, 1, 0, 0, 1)
    assert loop_placement(1, 3) == v_placement(1, 3) == (0, 0, 0)
    assert (stages_on(loop_placement(4, 2), 1), stages_on(v_placement(4), 0)) == ([1, 5], [0, 7])


@pytest.mark.parametrize("name", SHAPES)
def test_pickle_csv_and_text_give_the_schedule_back(name, tmp_path):
    schedule = add_final_actions(build(name, num_ranks=4, num_microbatches=8))
    schedule.to_csv(tmp_path / "mine.csv")
    read = Schedule.from_csv(tmp_path / "mine.csv")
    assert (read, read.name) == (schedule, "mine")
    costs = Costs(1, 1, 1, offload=0.5, reload=0.5, weight_input=0.3)
    copied = offload_activations(build("zb_h1", 2, 4), costs, "full")[0]
    for each in (schedule, lower(schedule), lower(copied)):
        assert pickle.loads(pickle.dumps(each)) == each
        again = Schedule.parse(str(each))
        assert again == each
        assert again[0][0].kind is each[0][0].kind


@pytest.mark.parametrize(
    ("text", "cells"),
    [  # the kinds of torch; copies and reductions come after what torch reads of a cell
        ("0F0 0B0 0W0 0F1 0BW1", "0F0,0I0,0W0,0F1,0B1\n"),
        ("0F0 0OFFLOAD0 0F1 0FREE0 0RELOAD0 0BW1", "0F0 0OFFLOAD0,0F1 0FREE0 0RELOAD0,0B1\n"),
        ("0F0 0B0 0W0 0REDUCE0", "0F0,0I0,0W0 0REDUCE0\n"),
    ],
)
def test_csv_is_torchs(text, cells, tmp_path):
    plan(text).to_csv(tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text() == cells


def test_csv_may_have_idle_slots(tmp_path):
    (tmp_path / "s.csv").write_text("0F0,,0B0\n,1F0,1B0,\n")
    assert Schedule.from_csv(tmp_path / "s.csv") == plan("0F0 0BW0\n1F0 1BW0")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ScheduleError, match=r"mine.csv' cannot be read: No such file"):
        Schedule.from_csv(tmp_path / "mine.csv")


def test_csv_that_cannot_be_is_refused(tmp_path):
    path = tmp_path / "s.csv"
    with pytest.raises(ScheduleError, match=r"0SEND_F0 cannot be written.*before lower\(\)"):
        lower(build("1f1b", num_ranks=2, num_microbatches=2)).to_csv(path)
    assert not path.exists()
    path.write_text("0F0,0SEND_F0\n")
    with pytest.raises(ScheduleError, match=r"'0SEND_F0' in .*s\.csv is no compute action"):
        Schedule.from_csv(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match=r"s\.csv has no rows of text, one for each rank"):
        Schedule.from_csv(path)


# Whether sums over microbatches have the same bits


@pytest.mark.parametrize(
    ("one", "other", "num_chunks"),
    [("1f1b", "zb_h2", None), ("gpipe", "zb_2p", None), ("gis", "interleaved_1f1b", 2)],
)
def test_families_add_up_in_the_order_of_microbatches(one, other, num_chunks):
    one, other = (build(name, 3, 6, num_chunks) for name in (one, other))
    assert accumulates_in_same_order(one, other)
    assert accumulates_in_same_order(one, lower(other))
    assert accumulates_in_same_order(
        one, other, [{0, 1}]
    )  # of two ranks: they add up by themselves


@pytest.mark.parametrize("kind", [Kind.F, Kind.B, Kind.W])
def test_another_order_of_microbatches_is_told(kind):
    plan = build("zb_h2", 2, 4)
    turned = [
        tuple(a._replace(microbatch=3 - a.microbatch) if a.kind is kind else a for a in rank)
        for rank in plan
    ]
    assert not accumulates_in_same_order(plan, Schedule.of(turned, "turned"))


def test_stages_of_one_rank_that_share_a_weight_have_to_take_turns_alike():
    one, other = build("1f1b_v", 2, 4), build("zb_v", 2, 4)
    assert accumulates_in_same_order(one, other)
    assert not accumulates_in_same_order(one, other, [{0, 3}])
    assert accumulates_in_same_order(one, one, [{0, 3}])

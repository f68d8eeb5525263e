import json
import pickle
from dataclasses import FrozenInstanceError

import pytest

from lightning_pipeoffload.schedule import (
    Costs,
    Schedule,
    ScheduleError,
    add_final_actions,
    build,
    lower,
    offload_activations,
)
from lightning_pipeoffload.schedule.placement import loop, stages_on, v
from lightning_pipeoffload.schedule.schedule import from_numbers, to_numbers
from tests.support.plans import SHAPES, plan

TWO_RANKS = """
0F0 0F1 0BW0 0BW1
1F0 1BW0 1F1 1BW1
"""


def test_sizes_are_read_off_the_actions():
    schedule = build("interleaved_1f1b", num_ranks=4, num_microbatches=8, num_chunks=3)
    assert schedule.num_ranks == len(schedule) == 4
    assert schedule.num_stages == 12
    assert schedule.num_chunks == 3
    assert schedule.num_microbatches == 8


def test_the_placement_is_read_off_the_actions():
    schedule = build("interleaved_1f1b", num_ranks=4, num_microbatches=4)
    assert schedule.stages_of(1) == (1, 5)
    assert [schedule.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_it_prints_one_line_per_rank():
    assert str(plan(TWO_RANKS)) == TWO_RANKS.strip()


def test_it_iterates_over_ranks():
    schedule = plan(TWO_RANKS)
    assert list(schedule) == [schedule[0], schedule[1]]
    assert isinstance(schedule[0], tuple)


def test_the_name_does_not_count_for_equality():
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    nameless = Schedule(schedule.actions)
    assert schedule.name == "1f1b"
    assert schedule == nameless
    assert hash(schedule) == hash(nameless)
    assert schedule != build("gpipe", num_ranks=2, num_microbatches=2)


def test_it_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        plan(TWO_RANKS).actions = ()


def test_lists_become_tuples():
    assert Schedule([list(rank) for rank in plan(TWO_RANKS)]) == plan(TWO_RANKS)


def test_it_survives_pickling():
    schedule = lower(build("zb_h1", num_ranks=2, num_microbatches=2))
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@pytest.mark.parametrize("name", SHAPES)
def test_csv_gives_the_schedule_back(name, tmp_path):
    schedule = build(name, num_ranks=4, num_microbatches=8)
    schedule.to_csv(tmp_path / "mine.csv")
    read = Schedule.from_csv(tmp_path / "mine.csv")
    assert read == schedule
    assert read.name == "mine"


def test_csv_has_copies_after_what_torch_reads_of_a_cell(tmp_path):
    text = "0F0 0OFFLOAD0 0F1 0FREE0 0RELOAD0 0BW1 0BW0"
    plan(text).to_csv(tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text() == "0F0 0OFFLOAD0,0F1 0FREE0 0RELOAD0,0B1,0B0\n"


def test_csv_has_reductions_there_too(tmp_path):
    schedule = add_final_actions(build("zb_h1", 2, 2))
    schedule.to_csv(tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text().splitlines()[0].endswith(",0I1,0W1 0REDUCE1")
    assert Schedule.from_csv(tmp_path / "s.csv") == schedule


def test_csv_has_the_kinds_of_torch(tmp_path):
    plan("0F0 0B0 0W0 0F1 0BW1").to_csv(tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text().split() == ["0F0,0I0,0W0,0F1,0B1"]


def test_csv_may_have_idle_slots(tmp_path):
    (tmp_path / "s.csv").write_text("0F0,,0B0\n,1F0,1B0,\n")
    assert Schedule.from_csv(tmp_path / "s.csv") == plan("0F0 0BW0\n1F0 1BW0")


def test_csv_refuses_a_lowered_plan(tmp_path):
    plan_of_two = lower(build("1f1b", num_ranks=2, num_microbatches=2))
    with pytest.raises(ScheduleError, match=r"0SEND_F0 cannot be written.*before lower\(\)"):
        plan_of_two.to_csv(tmp_path / "s.csv")
    assert not (tmp_path / "s.csv").exists()


def test_csv_names_the_cell_that_is_wrong(tmp_path):
    (tmp_path / "s.csv").write_text("0F0,0SEND_F0\n")
    with pytest.raises(ScheduleError, match=r"'0SEND_F0' in .*s\.csv is no compute action"):
        Schedule.from_csv(tmp_path / "s.csv")


def test_csv_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "s.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match=r"s\.csv has no rows of text, one for each rank"):
        Schedule.from_csv(tmp_path / "s.csv")


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "po_f"])
def test_a_plan_comes_back_through_json_as_it_was(name):
    plan = build(name, 3, 6)
    read = from_numbers(json.loads(json.dumps(to_numbers(plan))), name)
    assert read == plan
    assert read[0][0].kind is plan[0][0].kind


def test_so_do_copies_and_messages():
    costs = Costs(1, 1, 1, offload=0.5, reload=0.5, weight_input=0.3)
    plan = lower(offload_activations(build("zb_h1", 2, 4), costs, "full")[0])
    assert from_numbers(to_numbers(plan), plan.name) == plan


def test_numbers_that_are_not_three_for_each_action_are_refused():
    with pytest.raises(ValueError, match="zip"):
        from_numbers([[0, 0, 0, 1]], "cut off")


def test_loop_goes_round():
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)


def test_v_goes_down_and_back_up():
    assert v(3) == (0, 1, 2, 2, 1, 0)
    assert v(2, 3) == (0, 1, 1, 0, 0, 1)


def test_one_rank_holds_every_stage():
    assert loop(1, 3) == v(1, 3) == (0, 0, 0)


def test_stages_on_a_rank_are_in_model_order():
    assert stages_on(loop(4, 2), 1) == [1, 5]
    assert stages_on(v(4), 0) == [0, 7]

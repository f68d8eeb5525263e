import pytest

from lightning_pipeoffload.schedule import (
    Action,
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    build,
    simulate,
    validate,
)
from lightning_pipeoffload.schedule.builders.zb_v import lengthen
from lightning_pipeoffload.schedule.placement import v


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (4, 8), (4, 16), (8, 16), (16, 32)])
def test_equal_times_leave_no_bubble_and_every_rank_has_the_memory_of_1f1b(p, m):
    timeline = simulate(build("zb_v", p, m), Costs.unit())
    assert timeline.bubble_unsynchronized == pytest.approx(0)
    assert timeline.peak_memory == (2 * p,) * p


def test_first_and_last_stage_share_a_rank():
    schedule = build("zb_v", 4, 8)
    assert tuple(schedule.rank_of(stage) for stage in range(8)) == v(4) == (0, 1, 2, 3, 3, 2, 1, 0)


def test_forwards_before_the_first_backward():
    schedule = build("zb_v", 4, 8)
    printed = [" ".join(map(str, rank[:8])) for rank in schedule]
    assert printed[0] == "0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0"
    assert printed[3] == "3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3"


def test_few_microbatches_take_no_longer_than_interleaving_stages_one_by_one():
    for m in range(1, 8):
        span = max(simulate(build("zb_v", 4, m), Costs.unit()).span)
        assert span <= max(simulate(build("1f1b", 4, m), Costs(2, 2, 2)).span)


def test_costs_shorten_the_hand_made_order():
    costs = Costs(14.407, 14.380, 9.676, communication=1.610, activation=34, weight_residue=15)
    searched, hand_made = build("zb_v", 16, 48, costs=costs), build("zb_v", 16, 48)
    assert max(simulate(searched, costs).span) < max(simulate(hand_made, costs).span)


def test_more_memory_takes_the_rest_of_the_bubble():
    costs = Costs(14.407, 14.380, 9.676, communication=1.610, activation=1, weight_residue=0.4)
    schedule = build("zb_v", 8, 24, costs=costs, memory_limit=32)
    assert simulate(schedule, costs).bubble_unsynchronized < 0.005


@pytest.mark.parametrize(("activation", "residue"), [(0.1, 0.1), (0.3, 0.1), (0.1, 0.3)])
def test_the_smallest_limit_is_met_exactly(activation, residue):
    costs = Costs(1, 1, 1, activation=activation, weight_residue=residue)
    smallest = activation + max(activation, residue)
    assert build("zb_v", 4, 8, costs=costs, memory_limit=smallest * (1 + 1e-12))
    with pytest.raises(ScheduleError, match=r"use at least 0\.\d+ for zb_v"):
        build("zb_v", 4, 8, costs=costs, memory_limit=smallest * 0.99)


STEADY = ["1f1b", "zb_h1", "zb_v"]


def idle(schedule):
    timeline = simulate(schedule, Costs.unit())
    return max(timeline.span) - max(timeline.busy)


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("m", [12, 13, 40])
def test_more_microbatches_add_neither_bubble_nor_memory(name, m):
    few = build(name, 4, 12)
    many = lengthen(few, m)
    validate(many)
    assert many.num_microbatches == m
    assert idle(many) == pytest.approx(idle(few))
    assert simulate(many, Costs.unit()).peak_memory == simulate(few, Costs.unit()).peak_memory


def test_rounds_of_two_microbatches_do_not_make_one_more():
    f, b, w = ([Action(kind, 0, index) for index in range(2)] for kind in (Kind.F, Kind.B, Kind.W))
    in_pairs = Schedule.of([[*f, *b, *w]])
    assert lengthen(in_pairs, 3) is None
    assert lengthen(in_pairs, 4).num_microbatches == 4

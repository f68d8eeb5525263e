import pytest

from lightning_pipeoffload.schedule import Costs, Kind, build
from lightning_pipeoffload.schedule.placement import loop, v
from lightning_pipeoffload.schedule.search.list_schedule import fill_gaps
from lightning_pipeoffload.schedule.search.order_rules import InFlight
from lightning_pipeoffload.schedule.search.problem import Problem


def without_weights(schedule):
    return [[action for action in rank if action.kind is not Kind.W] for rank in schedule]


@pytest.mark.parametrize(("name", "depths"), [("zb_h1", [4, 3, 2, 1]), ("zb_h2", [7, 5, 3, 1])])
def test_the_hand_made_schedules_differ_in_depth_only(name, depths):
    problem = Problem(loop(4, 1), 8, Costs.unit(), memory_limit=depths[0])
    filled = fill_gaps(problem, InFlight(problem, depths), patience=0.0)
    assert without_weights(filled.schedule) == without_weights(build(name, 4, 8))


@pytest.mark.parametrize("depth", [2, 3, 5, 8])
def test_no_rank_has_more_in_flight_than_its_depth(depth):
    problem = Problem(v(4), 8, Costs(1, 1.5, 0.5))
    filled = fill_gaps(problem, InFlight(problem, [depth] * 4), patience=0.0)
    for rank in without_weights(filled.schedule):
        in_flight = 0
        for action in rank:
            in_flight += 1 if action.kind is Kind.F else -1
            assert in_flight <= depth


def test_room_for_the_later_stage_keeps_ranks_from_waiting_for_each_other():
    problem = Problem(v(3), 6, Costs.unit(), memory_limit=2)
    filled = fill_gaps(problem, InFlight(problem, [99] * 3), patience=0.0)
    assert filled.schedule is not None


def forwards_before_the_first_backward(punctuality):
    problem = Problem(loop(2, 1), 4, Costs(2, 2, 1, communication=0.25))
    order = InFlight(problem, [4, 1], punctuality)
    rank = fill_gaps(problem, order, patience=10.0).schedule[0]
    return [action.kind for action in rank].index(Kind.B)


def test_a_punctual_rank_waits_for_a_backward_rather_than_make_it_late():
    assert [forwards_before_the_first_backward(p) for p in (0.0, 1.0)] == [4, 3]

import pytest

from lightning_pipeoffload.schedule import Costs, Kind, validate
from lightning_pipeoffload.schedule.placement import v
from lightning_pipeoffload.schedule.search.list_schedule import fill_gaps
from lightning_pipeoffload.schedule.search.order_rules import FixedOrder
from lightning_pipeoffload.schedule.search.problem import Problem

F, B = Kind.F, Kind.B


def second_rank_late(overtaking):
    """Rank 0 wants B of stage 0 first, which takes a detour over a slow rank 1."""
    costs = Costs([1, 9, 9, 1], [1, 9, 9, 1], 0.5)
    problem = Problem(v(2), 2, costs)
    first = [(F, 0), (F, 0), (F, 3), (B, 3), (B, 0), (F, 3), (B, 3), (B, 0)]
    second = [(F, 1), (F, 2), (F, 1), (F, 2), (B, 2), (B, 1), (B, 2), (B, 1)]
    order = FixedOrder(problem, [first, second], overtaking)
    return fill_gaps(problem, order, patience=0.0).schedule


@pytest.mark.parametrize("overtaking", [True, False])
def test_every_action_runs_once(overtaking):
    schedule = second_rank_late(overtaking)
    validate(schedule)
    assert [len(rank) for rank in schedule] == [12, 12]


def test_without_overtaking_the_order_is_kept():
    kept = [
        str(action) for action in second_rank_late(overtaking=False)[0] if action.kind is not Kind.W
    ]
    assert kept == ["0F0", "0F1", "3F0", "3B0", "0B0", "3F1", "3B1", "0B1"]


def overtaken(overtaking):
    """Rank 0 wants the first B of stage 0 although a B of stage 1 is there."""
    costs = Costs([1, 1, 1, 1], [1, 9, 9, 1], 0.5)
    problem = Problem(v(2), 2, costs)
    first = [(F, 0), (F, 0), (F, 3), (F, 3), (B, 3), (B, 0), (B, 3), (B, 0)]
    second = [(F, 1), (F, 2), (F, 1), (F, 2), (B, 2), (B, 1), (B, 2), (B, 1)]
    filled = fill_gaps(problem, FixedOrder(problem, [first, second], overtaking), patience=0.0)
    return [str(action) for action in filled.schedule[0] if action.kind is B]


def test_a_ready_backward_overtakes_one_that_is_far_away():
    assert overtaken(overtaking=False) == ["3B0", "0B0", "3B1", "0B1"]
    assert overtaken(overtaking=True) == ["3B0", "3B1", "0B0", "0B1"]

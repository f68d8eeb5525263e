import pytest

from lightning_pipeoffload.schedule import Costs, ScheduleError
from lightning_pipeoffload.schedule.placement import loop, v
from lightning_pipeoffload.schedule.search.problem import Problem


def test_work_of_a_rank_is_that_of_all_its_stages():
    costs = Costs([1, 2, 3, 4], [1, 1, 1, 1], 0)
    assert Problem(v(2), 3, costs).work == (3 * (1 + 4 + 2), 3 * (2 + 3 + 2))


def test_a_hop_between_two_stages_of_one_rank_takes_no_time():
    operations = Problem(v(2), 1, Costs(1, 1, 1, communication=0.5)).operations
    assert operations.hops == [0.5, 0.0, 0.5, 0.0, 0.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("activation", "residue", "smallest"),
    [(2, 1, 4), (2, 2, 4), (2, 3, 5), ([1, 2, 3, 4], 1, 5), ([1, 2, 3, 4], [2, 2, 3, 4], 6)],
)
def test_smallest_limit_holds_one_microbatch_on_every_stage(activation, residue, smallest):
    costs = Costs(1, 1, 1, activation=activation, weight_residue=residue)
    assert Problem(v(2), 4, costs).smallest_limit == smallest


def test_a_limit_that_cannot_be_met_is_refused_with_the_smallest_that_can():
    problem = Problem(loop(2, 1), 4, Costs(1, 1, 1, activation=3))
    assert problem.limited_to(3, "zb").memory_limit == 3
    with pytest.raises(ScheduleError, match=r"memory_limit \(2\) is less .* at least 3 for zb"):
        problem.limited_to(2, "zb")


@pytest.mark.parametrize(("limit", "most"), [(3, 1), (5.9, 1), (6, 2), (100, 8), (float("inf"), 8)])
def test_as_many_activations_as_fit_beside_the_growth_of_a_backward(limit, most):
    costs = Costs(1, 1, 1, activation=3, weight_residue=2)
    assert Problem(loop(2, 1), 8, costs, limit).most_activations(0) == most

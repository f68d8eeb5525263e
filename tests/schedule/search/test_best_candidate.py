import pytest

from lightning_pipeoffload.schedule import Costs
from lightning_pipeoffload.schedule.placement import loop
from lightning_pipeoffload.schedule.search.best_candidate import Search
from lightning_pipeoffload.schedule.search.order_rules import InFlight
from lightning_pipeoffload.schedule.search.problem import Problem

PROBLEM = Problem(loop(4, 1), 8, Costs.unit())
SHALLOW, DEEP = [4, 3, 2, 1], [7, 5, 3, 1]


def search(*candidates, num_actions=10_000):
    found = Search(PROBLEM, num_actions)
    for depths in candidates:
        found.consider(InFlight(PROBLEM, depths), patience=0.0)
    return found


@pytest.mark.parametrize("candidates", [(SHALLOW, DEEP), (DEEP, SHALLOW), (DEEP,)])
def test_the_shortest_candidate_is_kept(candidates):
    assert search(*candidates).longest_span == 24


def test_a_spent_budget_keeps_the_first_candidate():
    assert search(SHALLOW, DEEP, num_actions=0).longest_span == 27


def test_no_candidate_is_no_schedule():
    with pytest.raises(RuntimeError, match="no candidate fits"):
        search().shortest()

"""What searches may choose, where the table of golden plans does not show it."""

import pytest

from lightning_pipeoffload.schedule import Costs, Kind, simulate, validate
from lightning_pipeoffload.schedule.builders.zb_v import hand_made
from lightning_pipeoffload.schedule.placement import loop, v
from lightning_pipeoffload.schedule.search.building_block import v_block
from lightning_pipeoffload.schedule.search.list_schedule import Search, fill_gaps, fill_rounds
from lightning_pipeoffload.schedule.search.order_rules import FixedOrder, InFlight
from lightning_pipeoffload.schedule.search.problem import Operations, Problem
from lightning_pipeoffload.schedule.search.squeeze import Policy, squeeze

INF = float("inf")


def by_clock(problem, ranks, patience=0.0, shorter_than=INF):
    order = FixedOrder(problem, ranks, overtaking=False)
    return fill_gaps(problem, order, patience, shorter_than)


def by_rounds(problem, ranks, is_patient_before_b=False, shorter_than=INF):
    order = FixedOrder(problem, ranks, overtaking=False)
    return fill_rounds(problem, order, is_patient_before_b, shorter_than)


def test_many_ranks_wait_less_by_rounds_than_by_the_clock():
    costs = Costs(6.763, 6.969, 5.251, communication=0.755, activation=1, weight_residue=0.43)
    problem = Problem(v(12), 36, costs, memory_limit=24)
    found = [fill(problem, hand_made(12, 36)) for fill in (by_rounds, by_clock)]
    assert found[0].longest_span < found[1].longest_span
    schedule = problem.operations.as_schedule(found[0].order)
    validate(schedule)
    timeline = simulate(schedule, costs)
    assert max(timeline.span) == pytest.approx(found[0].longest_span)
    assert max(timeline.peak_memory) <= problem.memory_limit


# Rank 0 wants the first B of stage 0 although a B of stage 3 is there.
F0, F1, F2, F3, B3, B2, B1, B0 = range(8)


def in_flight(problem, *rule, patience=0.0):
    filled = fill_gaps(problem, InFlight(problem, *rule), patience)
    schedule = problem.operations.as_schedule(filled.order)
    return [[action for action in rank if action.kind is not Kind.W] for rank in schedule]


def test_a_punctual_rank_waits_for_a_backward_rather_than_make_it_late():
    problem = Problem(loop(2, 1), 4, Costs(2, 2, 1, communication=0.25))
    ranks = [in_flight(problem, [4, 1], punctuality, patience=10.0)[0] for punctuality in (0, 1)]
    assert [[a.kind for a in rank].index(Kind.B) for rank in ranks] == [4, 3]


PROBLEM = Problem(loop(4, 1), 8, Costs.unit())
SHALLOW, DEEP = [4, 3, 2, 1], [7, 5, 3, 1]


@pytest.mark.parametrize(
    ("candidates", "budget", "span"),
    [((SHALLOW, DEEP), 10_000, 24), ((DEEP, SHALLOW), 10_000, 24), ((SHALLOW, DEEP), 0, 27)],
)
def test_the_shortest_candidate_within_the_budget_is_kept(candidates, budget, span):
    search = Search(PROBLEM, budget)
    for depths in candidates:
        search.consider(InFlight(PROBLEM, depths), patience=0.0)
    assert search.longest_span == span


def test_no_candidate_is_no_schedule():
    with pytest.raises(RuntimeError, match="no candidate fits"):
        Search(PROBLEM, 1).shortest()


def test_weights_first_runs_w_right_after_b():
    costs = Costs(14.4, 14.3, 9.7, communication=1.6, activation=1, weight_residue=0.6)
    operations = Operations(v(4), costs)
    order = v_block([1] * 3, turns=(1, 1, 1)).repeat(v(4), 9)
    squeezed = squeeze(order, operations, 8, costs.weight_residue, Policy(weights_first=True))
    kinds = [action.kind for action in operations.as_schedule(squeezed)[0]]
    assert kinds[kinds.index(Kind.B) + 1] is Kind.W

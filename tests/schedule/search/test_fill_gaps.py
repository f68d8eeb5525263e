import pytest

from lightning_pipeoffload.schedule import Costs, Kind, simulate
from lightning_pipeoffload.schedule.placement import loop
from lightning_pipeoffload.schedule.search.list_schedule import fill_gaps
from lightning_pipeoffload.schedule.search.order_rules import FixedOrder
from lightning_pipeoffload.schedule.search.problem import Problem


def one_rank(order, memory_limit=100.0):
    problem = Problem((0,), order.count("F"), Costs.unit(), memory_limit)
    ranks = [[(Kind(kind), 0) for kind in order]]
    return fill_gaps(problem, FixedOrder(problem, ranks, overtaking=False), patience=0.0)


def printed(filled):
    return ["".join(action.kind.value for action in rank) for rank in filled.schedule]


@pytest.mark.parametrize(("limit", "expected"), [(3, "FFBBFBWWW"), (2, "FFBBWFBWW"), (1, None)])
def test_weights_wait_until_their_memory_is_needed(limit, expected):
    filled = one_rank("FFBBFB", memory_limit=limit)
    assert (filled.schedule and printed(filled)[0]) == expected


def two_ranks(patience, shorter_than=float("inf"), w=1.0):
    problem = Problem(loop(2, 1), 2, Costs(1, 2, w, communication=0.25))
    first = [(Kind.F, 0), (Kind.F, 0), (Kind.B, 0), (Kind.B, 0)]
    last = [(Kind.F, 1), (Kind.B, 1), (Kind.F, 1), (Kind.B, 1)]
    return fill_gaps(problem, FixedOrder(problem, [first, last]), patience, shorter_than)


def test_a_weight_fills_the_gap_that_it_fits_into():
    assert printed(two_ranks(patience=0.0, w=1.0))[0] == "FFBWBW"


@pytest.mark.parametrize(("patience", "expected"), [(5.0, "FFBBWW"), (None, "FFBWBW")])
def test_in_a_gap_too_short_for_a_weight_patience_decides(patience, expected):
    assert printed(two_ranks(patience, w=1.5))[0] == expected


def test_the_longest_span_is_the_simulated_one():
    filled = two_ranks(patience=None)
    timeline = simulate(filled.schedule, Costs(1, 2, 1, communication=0.25))
    assert filled.longest_span == max(timeline.span)


def test_a_run_that_gets_no_shorter_is_given_up():
    complete = two_ranks(patience=None)
    given_up = two_ranks(patience=None, shorter_than=complete.longest_span)
    assert given_up.schedule is None
    assert given_up.num_actions < complete.num_actions == 12

import pytest

from lightning_pipeoffload.schedule import Costs, Kind, simulate, validate
from lightning_pipeoffload.schedule.builders.zb_v import hand_made
from lightning_pipeoffload.schedule.placement import loop, v
from lightning_pipeoffload.schedule.search.list_schedule import fill_gaps, fill_rounds
from lightning_pipeoffload.schedule.search.order_rules import FixedOrder
from lightning_pipeoffload.schedule.search.problem import Problem


def one_rank(order, memory_limit):
    problem = Problem((0,), order.count("F"), Costs.unit(), memory_limit)
    ranks = [[(Kind(kind), 0) for kind in order]]
    return fill_rounds(problem, FixedOrder(problem, ranks, overtaking=False), False)


def printed(filled):
    return ["".join(action.kind.value for action in rank) for rank in filled.schedule]


@pytest.mark.parametrize(("limit", "expected"), [(3, "FFBBFBWWW"), (2, "FFBBWFBWW"), (1, None)])
def test_weights_wait_until_their_memory_is_needed(limit, expected):
    filled = one_rank("FFBBFB", memory_limit=limit)
    assert (filled.schedule and printed(filled)[0]) == expected


def two_ranks(is_patient_before_b, w):
    problem = Problem(loop(2, 1), 2, Costs(1, 2, w, communication=0.25))
    first = [(Kind.F, 0), (Kind.F, 0), (Kind.B, 0), (Kind.B, 0)]
    last = [(Kind.F, 1), (Kind.B, 1), (Kind.F, 1), (Kind.B, 1)]
    order = FixedOrder(problem, [first, last], overtaking=False)
    return fill_rounds(problem, order, is_patient_before_b)


@pytest.mark.parametrize(
    ("is_patient", "w", "expected"),
    [(False, 1.0, "FFBWBW"), (False, 1.5, "FFBWBW"), (True, 1.5, "FFBBWW")],
)
def test_in_a_gap_too_short_for_a_weight_the_rank_waits_if_it_is_patient(is_patient, w, expected):
    assert printed(two_ranks(is_patient, w))[0] == expected


def problem_of(p, m):
    costs = Costs(6.763, 6.969, 5.251, communication=0.755, activation=1, weight_residue=0.43)
    return Problem(v(p), m, costs, memory_limit=2 * p)


def by_hand(problem):
    order = hand_made(problem.num_ranks, problem.num_microbatches)
    return FixedOrder(problem, order, overtaking=False)


def test_many_ranks_wait_less_than_by_the_clock():
    problem = problem_of(12, 36)
    by_rounds, by_clock = (
        fill(problem, by_hand(problem), patience)
        for fill, patience in ((fill_rounds, False), (fill_gaps, 0.0))
    )
    assert by_rounds.longest_span < by_clock.longest_span
    validate(by_rounds.schedule)
    timeline = simulate(by_rounds.schedule, problem.costs)
    assert max(timeline.span) == pytest.approx(by_rounds.longest_span)
    assert max(timeline.peak_memory) <= problem.memory_limit


def test_a_run_that_gets_no_shorter_is_given_up():
    problem = problem_of(4, 8)
    complete = fill_rounds(problem, by_hand(problem), False)
    given_up = fill_rounds(problem, by_hand(problem), False, complete.longest_span)
    assert complete.schedule is not None
    assert given_up.schedule is None

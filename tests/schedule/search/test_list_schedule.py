"""W goes where it is due, by the clock or by rounds; of candidates the shortest is kept."""

import pytest

from lightning_pipeoffload.schedule import Costs, Kind, build, simulate, validate
from lightning_pipeoffload.schedule.builders.zb_v import hand_made
from lightning_pipeoffload.schedule.placement import loop, v
from lightning_pipeoffload.schedule.search.list_schedule import Search, fill_gaps, fill_rounds
from lightning_pipeoffload.schedule.search.order_rules import FixedOrder, InFlight
from lightning_pipeoffload.schedule.search.problem import Problem

INF = float("inf")


def by_clock(problem, ranks, patience=0.0, shorter_than=INF):
    order = FixedOrder(problem, ranks, overtaking=False)
    return fill_gaps(problem, order, patience, shorter_than)


def by_rounds(problem, ranks, is_patient_before_b=False, shorter_than=INF):
    order = FixedOrder(problem, ranks, overtaking=False)
    return fill_rounds(problem, order, is_patient_before_b, shorter_than)


def printed(problem, filled):
    schedule = problem.operations.as_schedule(filled.order)
    return ["".join(action.kind.value for action in rank) for rank in schedule]


@pytest.mark.parametrize("fill", [by_clock, by_rounds])
@pytest.mark.parametrize(("limit", "expected"), [(3, "FFBBFBWWW"), (2, "FFBBWFBWW"), (1, None)])
def test_weights_wait_until_their_memory_is_needed(fill, limit, expected):
    problem = Problem((0,), 3, Costs.unit(), limit)
    filled = fill(problem, [["FB".index(kind) for kind in "FFBBFB"]])
    assert (filled.order and printed(problem, filled)[0]) == expected


def two_ranks(w):
    """F, F, B, B on the first rank and F, B, F, B on the last one."""
    return Problem(loop(2, 1), 2, Costs(1, 2, w, communication=0.25)), [[0, 0, 3, 3], [1, 2, 1, 2]]


@pytest.mark.parametrize(
    ("fill", "patience", "w", "expected"),
    [
        (by_clock, 0.0, 1.0, "FFBWBW"),  # it fits
        (by_clock, None, 1.5, "FFBWBW"),
        (by_clock, 5.0, 1.5, "FFBBWW"),
        (by_rounds, False, 1.0, "FFBWBW"),
        (by_rounds, False, 1.5, "FFBWBW"),
        (by_rounds, True, 1.5, "FFBBWW"),
    ],
)
def test_in_a_gap_too_short_for_a_weight_patience_decides(fill, patience, w, expected):
    problem, ranks = two_ranks(w)
    assert printed(problem, fill(problem, ranks, patience))[0] == expected


def test_the_longest_span_is_the_simulated_one():
    problem, ranks = two_ranks(1.0)
    filled = by_clock(problem, ranks, None)
    timeline = simulate(problem.operations.as_schedule(filled.order), problem.costs)
    assert filled.longest_span == max(timeline.span)


@pytest.mark.parametrize("fill", [by_clock, by_rounds])
def test_a_run_that_gets_no_shorter_is_given_up(fill):
    problem, ranks = two_ranks(1.0)
    complete = fill(problem, ranks)
    assert complete.num_actions == 12
    assert fill(problem, ranks, shorter_than=complete.longest_span).order is None


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
FIRST = [F0, F0, F3, F3, B3, B0, B3, B0]
SECOND = [F1, F2, F1, F2, B2, B1, B2, B1]


@pytest.mark.parametrize(
    ("overtaking", "expected"),
    [(False, ["3B0", "0B0", "3B1", "0B1"]), (True, ["3B0", "3B1", "0B0", "0B1"])],
)
def test_a_ready_backward_may_overtake_one_that_is_far_away(overtaking, expected):
    problem = Problem(v(2), 2, Costs([1, 1, 1, 1], [1, 9, 9, 1], 0.5))
    filled = fill_gaps(problem, FixedOrder(problem, [FIRST, SECOND], overtaking), patience=0.0)
    schedule = problem.operations.as_schedule(filled.order)
    validate(schedule)
    assert [str(action) for action in schedule[0] if action.kind is Kind.B] == expected


def in_flight(problem, *rule, patience=0.0):
    filled = fill_gaps(problem, InFlight(problem, *rule), patience)
    schedule = problem.operations.as_schedule(filled.order)
    return [[action for action in rank if action.kind is not Kind.W] for rank in schedule]


@pytest.mark.parametrize(("name", "depths"), [("zb_h1", [4, 3, 2, 1]), ("zb_h2", [7, 5, 3, 1])])
def test_the_hand_made_schedules_differ_in_depth_only(name, depths):
    found = in_flight(Problem(loop(4, 1), 8, Costs.unit(), depths[0]), depths)
    assert found == [[a for a in rank if a.kind is not Kind.W] for rank in build(name, 4, 8)]


@pytest.mark.parametrize("depth", [2, 3, 8])
def test_no_rank_has_more_in_flight_than_its_depth(depth):
    for rank in in_flight(Problem(v(4), 8, Costs(1, 1.5, 0.5)), [depth] * 4):
        num_in_flight = 0
        for action in rank:
            num_in_flight += 1 if action.kind is Kind.F else -1
            assert num_in_flight <= depth


def test_room_for_the_later_stage_keeps_ranks_from_waiting_for_each_other():
    problem = Problem(v(3), 6, Costs.unit(), memory_limit=2)
    assert fill_gaps(problem, InFlight(problem, [99] * 3), patience=0.0).order is not None


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

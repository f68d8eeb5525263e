"""Plans over several batches, cut where a rank has run a batch's forwards."""

import pytest

from lightning_pipeoffload.schedule import (
    SCHEDULES,
    Costs,
    Kind,
    build,
    cut_at_batches,
    lower,
    repeat_batch,
    simulate,
    tails,
    validate,
)
from lightning_pipeoffload.schedule.dependencies import outcome, replay
from tests.support.plans import plan

CASES = [(name, 2, 4, 2) for name in SCHEDULES]
CASES += [(name, 4, 8, 3) for name in SCHEDULES if name != "v"]  # which takes seconds to build


def joined_of(name, num_ranks, size, num_batches):
    return cut_at_batches(build(name, num_ranks, size * num_batches), size)


def parts_of(joined):
    """List every action with the batch in whose part it is."""
    for actions, ends in zip(joined.plan, joined.ends, strict=True):
        for place, action in enumerate(actions):
            yield action, sum(place >= end for end in ends)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_part_holds_its_forwards_and_nothing_later(case):
    joined, size = joined_of(*case), case[2]
    for action, part in parts_of(joined):
        batch = action.microbatch // size
        assert batch == part if action.kind in (Kind.F, Kind.SEND_F) else batch <= part


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_rank_waits_in_a_part_for_a_later_one(case):
    joined = joined_of(*case)
    validate(joined.plan)
    part_of = {outcome(action): part for action, part in parts_of(joined)}
    for step in replay(joined.plan):
        if step.awaited is not None:
            assert part_of[step.awaited] <= part_of[outcome(step.action)]


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b", "gis", "uniform"])
def test_a_cut_costs_no_time(name):
    whole, joined = lower(build(name, 4, 16)), joined_of(name, 4, 8, 2)
    assert simulate(joined.plan, Costs.unit()).makespan == simulate(whole, Costs.unit()).makespan


def test_backwards_are_left_for_the_next_part():
    joined = joined_of("1f1b", 2, 2, 2)
    left = [str(action) for action, part in parts_of(joined) if action.microbatch < 2 and part]
    assert left == "0RECV_B0 0B0 0RECV_B1 0B1 1B1 1SEND_B1 1W1".replace("0B", "0BW").split()


def test_what_is_early_waits_for_the_end_of_the_part():
    joined = cut_at_batches(plan("0F0 0F1 1F0 1BW0 0BW0 1F1 1BW1 0BW1"), 1)
    assert joined.plan == plan("0F0 1F0 0F1 1BW0 0BW0 1F1 1BW1 0BW1")
    assert joined.ends == ((2, 8),)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reductions_are_behind_all_batches(case):
    joined = joined_of(*case)
    reduced = joined.with_reductions()
    validate(reduced.plan)
    assert [ends[-1] for ends in reduced.ends] == [len(actions) for actions in reduced.plan]
    without = [(a, part) for a, part in parts_of(reduced) if a.kind is not Kind.REDUCE]
    assert without == list(parts_of(joined))
    for actions, ends in zip(reduced.plan, reduced.ends, strict=True):
        in_tails = [actions.index(weight) for tail in tails(actions) for weight in tail.weights]
        assert all(place >= ends[-2] for place in in_tails)


def test_batches_follow_each_other():
    assert repeat_batch(plan("0F0 0BW0"), 2) == plan("0F0 0BW0 0F1 0BW1")

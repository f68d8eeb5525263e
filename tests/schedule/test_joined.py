"""Plans over several batches, cut where a rank has run a batch's forwards."""

import pytest

from lightning_pipeoffload.schedule import SCHEDULES, Kind, build, cut_at_batches, lower
from lightning_pipeoffload.schedule.dependencies import outcome, replay

STARTS_EARLY = {"zb_v", "1f1b_v", "v_min", "v_half", "v", "uniform", "po_h", "po_f"}
FITTING = sorted(SCHEDULES.keys() - STARTS_EARLY)
SIZES = [(2, 4, 2), (4, 8, 3), (3, 6, 2)]


def parts_of(joined):
    """List (rank, place in the plan, action, batch in whose part it is)."""
    for rank, (actions, ends) in enumerate(zip(joined.plan, joined.ends, strict=True)):
        for place, action in enumerate(actions):
            yield rank, action, sum(place >= end for end in ends)


@pytest.mark.parametrize(("num_ranks", "size", "num_batches"), SIZES)
@pytest.mark.parametrize("name", FITTING)
def test_a_part_holds_its_forwards_and_nothing_later(name, num_ranks, size, num_batches):
    joined = cut_at_batches(lower(build(name, num_ranks, size * num_batches)), size)
    for _, action, part in parts_of(joined):
        batch = action.microbatch // size
        assert batch == part if action.kind in (Kind.F, Kind.SEND_F) else batch <= part


@pytest.mark.parametrize(("num_ranks", "size", "num_batches"), SIZES)
@pytest.mark.parametrize("name", FITTING)
def test_no_rank_waits_in_a_part_for_a_later_one(name, num_ranks, size, num_batches):
    joined = cut_at_batches(lower(build(name, num_ranks, size * num_batches)), size)
    part_of = {outcome(action): part for _, action, part in parts_of(joined)}
    for step in replay(joined.plan):
        if step.awaited is not None:
            awaited = (
                step.awaited if step.awaited in part_of else step.awaited._replace(kind=Kind.BW)
            )
            assert part_of[awaited] <= part_of[outcome(step.action)]


@pytest.mark.parametrize("name", sorted(STARTS_EARLY))
def test_what_starts_on_a_batch_early_is_not_cut(name):
    assert cut_at_batches(lower(build(name, 4, 16)), 8) is None


def test_backwards_are_left_for_the_next_part():
    joined = cut_at_batches(lower(build("1f1b", 2, 4)), 2)
    left = [str(a) for _, a, part in parts_of(joined) if a.microbatch < 2 and part == 1]
    assert left == ["0RECV_B0", "0BW0", "0RECV_B1", "0BW1", "1B1", "1SEND_B1", "1W1"]

"""Schedules whose sums are equal bits are told from those whose are not."""

import pytest

from lightning_pipeoffload.schedule import Kind, Schedule, build, lower, sums_alike


@pytest.mark.parametrize(
    ("one", "other", "num_chunks"),
    [("1f1b", "zb_h2", None), ("gpipe", "zb_2p", None), ("gis", "interleaved_1f1b", 2)],
)
def test_families_add_up_in_the_order_of_microbatches(one, other, num_chunks):
    assert sums_alike(build(one, 3, 6, num_chunks), build(other, 3, 6, num_chunks))
    assert sums_alike(build(one, 3, 6, num_chunks), lower(build(other, 3, 6, num_chunks)))


@pytest.mark.parametrize("kind", [Kind.F, Kind.B, Kind.W])
def test_another_order_of_microbatches_is_told(kind):
    plan = build("zb_h2", 2, 4)
    turned = [
        tuple(a._replace(microbatch=3 - a.microbatch) if a.kind is kind else a for a in rank)
        for rank in plan
    ]
    assert not sums_alike(plan, Schedule.of(turned, "turned"))


def test_stages_of_one_rank_that_share_a_weight_have_to_take_turns_alike():
    one, other = build("1f1b_v", 2, 4), build("zb_v", 2, 4)
    assert sums_alike(one, other)
    assert sums_alike(one, other, [{0}, {1, 2}]) == (
        [(a.stage, a.microbatch) for a in one[1] if a.kind is not Kind.F]
        == [(a.stage, a.microbatch) for a in other[1] if a.kind is not Kind.F]
    )
    assert not sums_alike(one, other, [{0, 3}])
    assert sums_alike(one, one, [{0, 3}])


def test_stages_of_two_ranks_that_share_a_weight_add_up_by_themselves():
    assert sums_alike(build("1f1b", 2, 4), build("zb_h2", 2, 4), [{0, 1}])

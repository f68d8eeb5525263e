"""``trainer.should_stop`` of one rank counts for all, after the same batch."""

from __future__ import annotations

import pytest

from tests.support.pairs import first, some
from tests.support.stopped import stop

EXACT = ["on_fit_start", "on_train_epoch_start", "on_validation_end", "on_train_epoch_end"]


@pytest.mark.parametrize(
    ("size", "where", "ranks_that_stop", "schedule"),
    some(
        [
            (3, "step", None, "zb_v"),
            (2, "step", None, "auto"),
            (2, "on_train_batch_start", None, "auto"),
            (3, "on_train_batch_end", None, "auto"),
            *((2, where, [place % 2], "auto") for place, where in enumerate(EXACT)),
        ],
        2,
    ),
)
def test_all_stop_where_one_device_does(ranks, size, where, ranks_that_stop, schedule):
    done = ranks(size).run(stop, size, where, ranks_that_stop, schedule)
    plain = stop(0, where, None)
    for found in done:
        assert found[:2] == plain[:2]
        assert found[2] == pytest.approx(plain[2], rel=1e-9)


@pytest.mark.parametrize(("size", "rank"), first(2, [(2, 0), (3, 1), (2, 1), (3, 2)]))
def test_what_one_rank_sets_in_a_hook_of_a_batch_stops_all_after_the_next(ranks, size, rank):
    done = ranks(size).run(stop, size, "on_train_batch_end", [rank])
    assert {found[:2] for found in done} == {(4, 4)}


def test_where_batches_accumulate_all_stop_after_the_batch_as_on_one_device(ranks):
    done = ranks(2).run(stop_accumulating)
    assert {found[:2] for found in done} == {(0, 3)}


def stop_accumulating():
    return stop(2, "step", None, accumulate_grad_batches=4)

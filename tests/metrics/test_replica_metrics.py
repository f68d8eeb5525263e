"""What replicas log, gather and reduce is what they would under DistributedDataParallel."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.support import replica_fits, replica_metrics


@pytest.fixture(scope="module")
def expected(ranks):
    return ranks(2).run(replica_metrics.fit, "ddp", 1)


@pytest.mark.parametrize(("num_ranks", "schedule"), [(1, "1f1b"), (2, "zb_v")])
def test_it_is_what_ddp_has(ranks, expected, num_ranks, schedule):
    fit = partial(replica_metrics.fit, schedule=schedule)
    found = ranks(2 * num_ranks).run(fit, "", num_ranks)
    roots = found[::num_ranks]
    assert roots[0]["metrics"] == pytest.approx(expected[0]["metrics"], abs=1e-10)
    # What others decide by is global rank 0's.
    assert {str(each["metrics"]["val_own"]) for each in found} == {
        str(found[0]["metrics"]["val_own"])
    }
    for root, plain in zip(roots, expected, strict=True):
        assert root["gathered"][:-1] == plain["gathered"][:-1]
        torch.testing.assert_close(root["gathered"][-1], plain["gathered"][-1], atol=1e-10, rtol=0)
    for replica in range(2):
        state = {}
        for each in found[replica * num_ranks : (replica + 1) * num_ranks]:
            state |= each["state"]
        assert state.keys() == expected[0]["state"].keys()
        for name, value in expected[0]["state"].items():
            torch.testing.assert_close(state[name], value, atol=1e-10, rtol=0, msg=name)


@pytest.mark.parametrize(("num_ranks", "stopping"), [(1, 1), (2, 3)])
def test_replicas_decide_alike_by_what_each_logs_for_itself(ranks, tmp_path, num_ranks, stopping):
    train = partial(replica_fits.train, callbacks=[replica_fits.Decides(stopping, 2)])
    found = ranks(2 * num_ranks).run(train, 2, num_ranks, str(tmp_path / "trained.ckpt"))
    one, other = found[:num_ranks], found[num_ranks:]
    assert one[0]["tokens"] != other[0]["tokens"]
    assert {len(each["tokens"]) for each in found} == {3}  # one more: all hear of it there
    assert [each["weights"] for each in one] == [each["weights"] for each in other]
    assert len({str(each["rates"]) for each in found}) == 1

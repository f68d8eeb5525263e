"""What is logged, in every way, equals what one device logs; so do the hooks that log it."""

from __future__ import annotations

import pytest
import torch

from tests.support import logged
from tests.support.pairs import some

# bfloat16 keeps 8 bits and float16 11; a sum over microbatches rounds otherwise than one over all.
TOLERANCE = {"16-true": 5e-3, "bf16-mixed": 2e-2}
TOLERANCE["metric objects"] = 1e-6  # torchmetrics counts in float32
TOLERANCE["undetached"] = 1e-6


@pytest.fixture(scope="module")
def job(ranks):
    """Run a row with both schedules in one go."""
    return lambda row: ranks(2).run(_fit_both, row)


def _fit_both(row):
    return [logged.fit(2, row, schedule=schedule) for schedule in ("1f1b", "zb_v")]


@pytest.mark.parametrize("row", some(logged.ROWS, 3))
def test_all_ranks_see_what_one_device_logs(job, row):
    expected = logged.fit(0, row)
    for global_rank, results in enumerate(job(row)):
        for result in results:
            for kind in ("seen", "validated", "tested") if global_rank else expected:
                assert_close(result[kind], expected[kind], TOLERANCE.get(row, 1e-9))


def test_a_single_rank_sees_what_one_device_logs(ranks):
    ((found,),) = ranks(1).run(_fit_alone)
    assert_close(found, logged.fit(0, "undetached")["lines"], 1e-6)


def _fit_alone():
    return [logged.fit(1, "undetached")["lines"]]


def assert_close(found, expected, tolerance):
    """Compare lists of metrics; those that a logger got have their step beside."""
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        if isinstance(other, tuple):
            assert mine[0] == other[0]
            mine, other = mine[1], other[1]
        assert mine == pytest.approx(other, rel=tolerance, abs=tolerance, nan_ok=True)


def test_buffers_are_saved_from_the_stage_that_wrote_them(ranks, tmp_path):
    path = str(tmp_path / "last.ckpt")
    logged.written(0, path)
    expected = torch.load(path)["state_dict"]
    for schedule in ("1f1b", "zb_h1"):
        ranks(2).run(logged.written, 2, path, schedule)
        state = torch.load(path)["state_dict"]
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(state[name], value, rtol=1e-9), name

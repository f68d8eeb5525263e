"""Blocks that the strategy compiles, in real processes."""

import time
from datetime import timedelta

import pytest
import torch
from torch._dynamo import lookup_backend

from tests.support import fits

_slept = []


def slow_on_one_rank(module, inputs):
    """Compile for training, on global rank 0 for longer than ranks wait for each other."""
    if torch.distributed.get_rank() == 0 and torch.is_grad_enabled() and not _slept:
        _slept.append(True)
        time.sleep(6)
    return lookup_backend("aot_eager")(module, inputs)


def _fit(folder, compile):
    torch.compiler.reset()
    options = {"module": {"dropout": 0.0, "depth": 4}, "timeout": timedelta(seconds=4)}
    return fits.fit(2, folder, compile=compile, **options)


@pytest.mark.slow  # on a busy machine ranks are apart by more than its timeout elsewhere too
def test_ranks_wait_as_long_as_others_compile(ranks, tmp_path):
    plain = ranks(2).run(_fit, str(tmp_path), False)
    compiled = ranks(2).run(_fit, str(tmp_path), {"backend": slow_on_one_rank})
    for before, now in zip(plain, compiled, strict=True):
        assert now["losses"] == pytest.approx(before["losses"], rel=1e-10)
        assert now["metrics"] == pytest.approx(before["metrics"], rel=1e-10)
        assert now["parameters"] == before["parameters"]
        measured = [fit["report"]["measured"]["deferred_flops"] for fit in (before, now)]
        assert measured[0] == measured[1]

"""When offloading fails in a run of processes, all of them end, and one says where and why."""

from __future__ import annotations

import re

import pytest

from tests.support import failing_offload
from tests.support.forked_runs import run_forked
from tests.support.pairs import first

FAILURES = {
    "host": (
        "OFFLOAD of microbatch 0",
        r"stage \d, microbatch 0: host memory for offloading is exhausted: .* host_memory_limit is "
        r"0\.01 MiB; offload less",
    ),
    "shape": ("F of microbatch 2", r"blocks\.1 returned .*31, 64.* where .*32, 64.* was expected"),
    "copy": (
        r"OFFLOAD of microbatch \d",
        r"stage \d, microbatch \d: the copy of the tensor \(32, 64\) of float32 to the host failed",
    ),
}


@pytest.mark.parametrize("cause", first(1, [*FAILURES]))
def test_the_place_and_the_tensor_are_named(cause):
    place, message = FAILURES[cause]
    run = run_forked(failing_offload.main, cause, "0")
    assert run.status == 1
    assert re.search(rf"\[pipeoffload\] global rank \d failed in stage \d, {place}", run.errors)
    assert re.search(message, run.errors)

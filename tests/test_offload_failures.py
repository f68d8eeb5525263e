"""When offloading fails in a run of processes, all of them end, and one says where and why."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "failing_offload.py"
FAILURES = {
    "host": (
        "OFFLOAD of microbatch 0",
        r"stage \d, microbatch 0: host memory for offloading is exhausted: .* host_memory_limit is "
        r"10\.00 KiB; offload less",
    ),
    "shape": ("F of microbatch 2", r"blocks\.1 returned .*31, 64.* where .*32, 64.* was expected"),
    "copy": (
        r"OFFLOAD of microbatch \d",
        r"stage \d, microbatch \d: the copy of the tensor \(32, 64\) of float32 to the host failed",
    ),
}


@pytest.mark.parametrize("cause", FAILURES)
def test_the_place_and_the_tensor_are_named(cause):
    # Ends when the last process has closed its standard error.
    done = subprocess.run(
        [sys.executable, SCRIPT, cause, "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    place, message = FAILURES[cause]
    assert done.returncode == 1
    assert re.search(rf"\[pipeoffload\] global rank \d failed in stage \d, {place}", done.stderr)
    assert re.search(message, done.stderr)

"""Faults at points drawn by a seed: all processes are gone in time, with a status and one cause.

None is in the default run: ``pytest -m faults tests/processes/test_seeded_faults.py``.
"""

import random
import time

import pytest

from tests.support import failing
from tests.support.forked_runs import run_forked

TIMEOUT = 5.0
ACTS = {
    "kill": (", which was killed by SIGKILL", ", which is gone", "which ended"),
    "stop": (", which does not answer", ", which is gone", "which was killed by SIGKILL"),
    "terminate": (": told to stop by SIGTERM", ", which was killed by SIGTERM", ", which is gone"),
    "raise": (": RuntimeError: on purpose",),
    "exit": (": sys.exit(3) in ",),
    "exit_0": (": sys.exit(0) in ",),
}
STATUSES = {"kill": {1, 137}, "stop": {1, 137}, "terminate": {143}, "exit": {3}, "exit_0": {1}}
NUM_POINTS = 30
NUM_OVER_REPLICAS = 20


def draw(point):
    drawn = random.Random(point)
    act = list(ACTS)[point % len(ACTS)]
    num_devices = 4 if point >= NUM_POINTS else drawn.choice([2, 3])
    return act, drawn.choice(failing.HOOKS), drawn.randrange(num_devices), num_devices


def over_replicas(point):
    """Let the last points be in two replicas of two ranks, every other one with shared steps."""
    if point < NUM_POINTS:
        return ()
    sharding = "optimizer" if point % 2 else "none"
    return ("--replicas", "2", "--sharding", sharding)


@pytest.mark.faults
@pytest.mark.parametrize("point", range(NUM_POINTS + NUM_OVER_REPLICAS))
def test_a_fault_ends_all_in_time(point, tmp_path):
    act, hook, rank, num_devices = draw(point)
    arguments = ("--hook", hook, "--act", act, "--rank", str(rank), "--devices", str(num_devices))
    started = time.monotonic()
    run = run_forked(
        failing.main,
        *(*arguments, *over_replicas(point)),
        *("--timeout", str(TIMEOUT), "--save-to", str(tmp_path)),
    )
    taken = time.monotonic() - started
    what = f"{act} in {hook} of rank {rank} of {num_devices}: {run.lines}"
    assert run.status in STATUSES.get(act, {1}), what
    # The run itself takes seconds, and the machine of the tests may stand still for a while.
    assert taken < 6 * (TIMEOUT + 15), what
    because = [line for line in run.lines if "stops because of" in line]
    blamed = {line.partition("because of ")[2] for line in because}
    assert all(f"global rank {rank}" in cause for cause in blamed), what
    assert any(words in cause for cause in blamed for words in ACTS[act]), what

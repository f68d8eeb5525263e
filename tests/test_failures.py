"""When a rank fails, every rank of the run ends soon and says why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "failing.py"


def run(cause: str, rank: int) -> tuple[int, str, float]:
    """Run until every process has ended; return status, standard error and the seconds it took."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, SCRIPT, cause, str(rank)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,  # open until the last process has ended
        text=True,
        timeout=120,
        env=environment,
        start_new_session=True,  # a terminal's Ctrl-C goes to the processes of its session
    )
    return done.returncode, done.stderr, time.monotonic() - start


def lines_of(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("[pipeoffload]")]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_a_step_names_the_place_and_stops_all(rank):
    status, errors, _ = run("step", rank)
    assert status != 0
    stage = 1 - rank  # the last stage is on global rank 0
    assert f"[pipeoffload] global rank {rank} failed in stage {stage}, F of microbatch 0" in errors
    assert (
        errors.count("KeyError: 'no such thing'") <= 2
    )  # the traceback, and the other rank's line
    other = f"[pipeoffload] global rank {1 - rank} stops because of global rank {rank}: KeyError"
    assert sum(line.startswith(other) for line in lines_of(errors)) == 1


def test_an_exception_in_a_hook_stops_all():
    status, errors, _ = run("hook", 1)
    assert status != 0
    assert (
        "[pipeoffload] global rank 0 stops because of global rank 1: RuntimeError: in a hook"
        in lines_of(errors)
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_refusal_on_one_rank_ends_a_rank_that_waits_with_the_same_status(rank):
    status, errors, _ = run("refusal", rank)
    assert lines_of(errors) == [
        f"[pipeoffload] global rank {1 - rank} stops because of global rank {rank}: "
        "ValueError: not like this"
    ]
    assert status == (1 if rank == 0 else 2)  # a script that raises ends with 1
    assert "frame #" not in errors  # torch's own complaint about a store that is gone


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_stops_all(rank):
    status, errors, seconds = run("kill", rank)
    assert status != 0
    (line,) = lines_of(errors)
    assert line.startswith(
        f"[pipeoffload] global rank {1 - rank} stops because of global rank {rank}, which"
    )
    assert seconds < 60  # 30 to start on a busy machine, 30 to end


def test_ranks_that_read_other_batches_are_reported():
    status, errors, _ = run("batch", 1)
    assert status != 0
    assert "global ranks [1] read another batch in training_step than global rank 0" in errors


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_told_to_stop_stops_all(rank):
    status, errors, _ = run("sigterm", rank)
    assert status == 143
    other = f"global rank {1 - rank} stops because of global rank {rank}: told to stop by SIGTERM"
    assert lines_of(errors) == [f"[pipeoffload] {other}"]


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_ends_all_with_the_status_of_a_shell(rank):
    status, errors, seconds = run("ctrl_c", rank)
    assert status == 130
    assert "Traceback" not in errors
    assert len(lines_of(errors)) <= 1
    assert seconds < 60

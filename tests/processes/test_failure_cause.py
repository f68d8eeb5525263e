import subprocess
import sys
from dataclasses import replace

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipeoffload.processes.failure_cause import (
    Failure,
    cause_of_end,
    describe,
    first_line,
    status_after,
)
from lightning_pipeoffload.schedule import ScheduleError

FROM_A_WORKER = "Caught KeyError in DataLoader worker process 0.\nTraceback:\n  line\nKeyError: 3\n"


@pytest.mark.parametrize(
    ("exception", "line"),
    [
        (ValueError("no\nmore"), "ValueError: no"),
        (AssertionError(), "AssertionError"),
        (SystemExit(3), "sys.exit(3)"),
        (SIGTERMException(), "told to stop by SIGTERM"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_an_exception_in_one_line(exception, line):
    assert describe(exception) == line


def test_a_workers_own_exception_is_in_the_line():
    line = "Caught KeyError in DataLoader worker process 0. KeyError: 3"
    assert first_line(RuntimeError(FROM_A_WORKER)) == line


@pytest.mark.parametrize(
    ("exception", "has_trained", "status"),
    [
        (ValueError(), False, 2),
        (ValueError(), True, 1),
        (ScheduleError(), True, 2),
        (RuntimeError(), False, 1),
        (SystemExit(3), True, 3),
        (SystemExit(0), True, 1),
        (SystemExit("so"), True, 1),
        (SIGTERMException(), True, 143),
        (KeyboardInterrupt(), True, 130),
    ],
)
def test_the_status_is_never_0(exception, has_trained, status):
    assert status_after(exception, has_trained) == status


@pytest.mark.parametrize(
    ("end", "failure"),
    [
        ("raise SystemExit(3)", Failure("which ended with status 3", 1, True)),
        ("os.kill(os.getpid(), 9)", Failure("which was killed by SIGKILL", 1, True)),
        ("os.kill(os.getpid(), 15)", Failure("which was killed by SIGTERM", 143, True)),
    ],
)
def test_what_the_status_of_a_process_tells(end, failure):
    process = subprocess.Popen([sys.executable, "-c", f"import os; {end}"])
    process.wait()
    assert cause_of_end(process, 1) == replace(failure, cause=f"global rank 1, {failure.cause}")


@pytest.mark.parametrize("is_deaf", [True, False])
def test_a_failure_comes_back_from_the_store(is_deaf):
    failure = Failure("global rank 1: ValueError: 2 things", 2, is_deaf)
    assert Failure.decode(failure.encode().encode()) == failure

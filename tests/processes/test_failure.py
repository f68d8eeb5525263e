import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipeoffload.processes import launched_processes
from lightning_pipeoffload.processes.failure import (
    Failure,
    cause_of_end,
    describe,
    first_line,
    status_after,
)
from lightning_pipeoffload.processes.launched_processes import LaunchedProcesses
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


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_failure_comes_back_from_the_store(is_gone):
    failure = Failure("global rank 1: ValueError: 2 things", 2, is_gone)
    assert Failure.decode(failure.encode().encode()) == failure


class Ended:
    def __init__(self, signum):
        self.returncode = -signum

    def poll(self):
        return self.returncode


ABORTED, KILLED = Ended(signal.SIGABRT), Ended(signal.SIGKILL)


@pytest.mark.parametrize("children", [[ABORTED, KILLED], [KILLED, ABORTED]])
def test_who_aborted_is_named_after_who_was_killed(children):
    processes = LaunchedProcesses(0, 0, children)
    failure = processes.find_ended_child(is_connecting=False)
    assert failure.cause == (
        f"global rank {1 + children.index(KILLED)}, which was killed by SIGKILL"
    )


def test_who_aborted_is_named_when_nothing_else_comes_up(monkeypatch):
    processes = LaunchedProcesses(0, 0, [ABORTED])
    assert processes.find_ended_child(is_connecting=False) is None
    monkeypatch.setattr(launched_processes, "_CAUSE_SECONDS", -1.0)
    failure = processes.find_ended_child(is_connecting=False)
    assert failure.cause == "global rank 1, which was killed by SIGABRT"

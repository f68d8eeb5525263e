"""What the end of a process or an exception says, in one line and as a status."""

import signal
from types import SimpleNamespace

import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipeoffload.processes import launcher
from lightning_pipeoffload.processes.failure import (
    Failure,
    describe,
    exit_status,
    failure_of_ended_process,
)
from lightning_pipeoffload.processes.launcher import LaunchedProcesses
from lightning_pipeoffload.schedule import ScheduleError


class NoMessageError(Exception):
    """Cannot be printed."""

    def __str__(self):
        raise KeyError


@pytest.mark.parametrize(
    ("exception", "line"),
    [
        (NoMessageError(), "NoMessageError: its message cannot be shown"),
        (OSError("no file b\udce4ren"), "OSError: no file b\\udce4ren"),
        (ValueError("no\nmore"), "ValueError: no"),
        (AssertionError(), "AssertionError"),
        (
            RuntimeError(
                "Caught KeyError in DataLoader worker 0.\nTraceback:\n  line\nKeyError: 3\n"
            ),
            "RuntimeError: Caught KeyError in DataLoader worker 0. KeyError: 3",
        ),
    ],
)
def test_an_exception_in_one_line(exception, line):
    assert describe(exception) == line


@pytest.mark.parametrize(
    ("exception", "has_trained", "status"),
    [
        (ValueError(), False, 2),
        (ValueError(), True, 1),
        (ScheduleError(), True, 2),
        (RuntimeError(), False, 1),
        (SystemExit(3), True, 3),
        (SystemExit(0), True, 1),
        (SystemExit(256), True, 1),
        (SystemExit(1 << 40 | 3), True, 3),
        (SystemExit("so"), True, 1),
        (SIGTERMException(), True, 143),
        (KeyboardInterrupt(), True, 130),
    ],
)
def test_the_status_is_never_0(exception, has_trained, status):
    assert exit_status(exception, has_trained) == status


@pytest.mark.parametrize(
    ("returncode", "how", "status"),
    [
        (3, "ended with status 3", 1),
        (-9, "was killed by SIGKILL", 1),
        (-15, "was killed by SIGTERM", 143),
    ],
)
def test_what_the_status_of_a_process_tells(returncode, how, status):
    failure = failure_of_ended_process(SimpleNamespace(returncode=returncode), 1)
    assert failure == Failure(f"global rank 1, which {how}", status, is_gone=True)


class Ended:
    def __init__(self, signum):
        self.returncode = -signum

    def poll(self):
        return self.returncode


ABORTED, KILLED = Ended(signal.SIGABRT), Ended(signal.SIGKILL)


@pytest.mark.parametrize("children", [[ABORTED, KILLED], [KILLED, ABORTED]])
def test_who_aborted_is_named_after_who_was_killed(children):
    processes = LaunchedProcesses(0, 0, children)
    failure = processes.find_child_failure(is_connecting=False)
    assert failure.cause == (
        f"global rank {1 + children.index(KILLED)}, which was killed by SIGKILL"
    )


def test_who_aborted_is_named_when_nothing_else_comes_up(monkeypatch):
    processes = LaunchedProcesses(0, 0, [ABORTED])
    assert processes.find_child_failure(is_connecting=False) is None
    monkeypatch.setattr(launcher, "_CAUSE_SECONDS", -1.0)
    failure = processes.find_child_failure(is_connecting=False)
    assert failure.cause == "global rank 1, which was killed by SIGABRT"

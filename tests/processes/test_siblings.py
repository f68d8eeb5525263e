import signal

import pytest

from lightning_pipeoffload.processes import siblings
from lightning_pipeoffload.processes.siblings import LaunchedProcesses


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
    monkeypatch.setattr(siblings, "_SECONDS_FOR_A_CAUSE", -1.0)
    failure = processes.find_ended_child(is_connecting=False)
    assert failure.cause == "global rank 1, which was killed by SIGABRT"

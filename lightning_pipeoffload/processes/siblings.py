"""The processes of one machine that Lightning's launcher started watch each other.

Global rank 0's process starts the others as its children. From then on, and before any of them can
talk to another, each can be seen to end: a child by its parent, the parent by its children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning.fabric.strategies.launchers.subprocess_script import (
    _ChildProcessObserver,  # private: it kills this process, without a word, when a child has ended
)

from lightning_pipeoffload.processes.failure_cause import Failure, cause_of_end

# What has made a rank abort has this long to show up.
_SECONDS_FOR_A_CAUSE = 5.0

_LAUNCHER = "PIPEOFFLOAD_LAUNCHER"


@contextmanager
def signing_as_launcher() -> Iterator[None]:
    """Let the ranks that this process starts meanwhile know who started them.

    Ranks that are started at another time, by other means, are not told: their parent is another.
    """
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(_LAUNCHER, None)


class LaunchedProcesses:
    """The others of a machine, as one of its processes sees them.

    Args:
        global_rank: The global rank of this process.
        local_rank: The local rank of this process.
        children: Processes that this one launched, for the global ranks after its own.
    """

    def __init__(
        self, global_rank: int, local_rank: int, children: Sequence[subprocess.Popen[bytes]]
    ) -> None:
        self._first = global_rank - local_rank
        self._launcher = int(os.environ.get(_LAUNCHER, "0")) if local_rank else 0
        self._aborted: dict[int, float] = {}
        self._children = dict(enumerate(children, start=global_rank + 1))
        _retire_observer()

    def find_lost_launcher(self) -> Failure | None:
        """Return that the process which launched this one is gone, if it is."""
        if not self._launcher or os.getppid() == self._launcher:
            return None
        return Failure(f"global rank {self._first}, which is gone", is_deaf=True)

    def find_ended_child(self, is_connecting: bool) -> Failure | None:
        """Return which child has ended and should not have.

        Args:
            is_connecting: Whether the ranks cannot talk yet, so that nobody may leave, not even
                with status 0; later one that is done may leave a moment before the others.
        """
        for global_rank, child in self._children.items():
            has_ended = child.poll() is not None and (is_connecting or child.returncode)
            is_aborted = child.returncode == -signal.SIGABRT
            if has_ended and (not is_aborted or self._has_stayed_alone(global_rank)):
                return cause_of_end(child, global_rank)
        return None

    def _has_stayed_alone(self, global_rank: int) -> bool:
        """Whether nothing else has come up since a rank was first seen to have aborted itself.

        NCCL's watchdog aborts who waits for a rank that is gone, and may do so before anyone has
        said which.
        """
        first_seen = self._aborted.setdefault(global_rank, time.monotonic())
        return time.monotonic() - first_seen > _SECONDS_FOR_A_CAUSE

    @property
    def has_children(self) -> bool:
        """Whether this process launched others."""
        return bool(self._children)

    def kill(self, global_ranks: Sequence[int]) -> None:
        """Kill those of these ranks that this process launched: they may stand still for ever."""
        for global_rank in global_ranks:
            if global_rank in self._children and not self.has_ended(global_rank):
                self._children[global_rank].send_signal(signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill all that this process launched."""
        self.kill(list(self._children))

    def kill_launcher(self) -> None:
        """Kill the process that launched this one, if it did and is there."""
        if self._launcher and self.find_lost_launcher() is None:
            os.kill(self._launcher, signal.SIGKILL)

    def has_ended(self, global_rank: int) -> bool:
        """Whether that rank is known to have ended."""
        child = self._children.get(global_rank)
        return child is not None and child.poll() is not None


def _retire_observer() -> None:
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []

"""The processes of one machine, which watch each other before the ranks can communicate.

Global rank 0's process, or the first one of a machine, starts the others as its children: it sees
their exit statuses, and they see when it is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from lightning.fabric.strategies.launchers.subprocess_script import (
    _ChildProcessObserver,  # private: it kills this process, without a word, when a child has ended
)

from lightning_pipeoffload.processes.failure import POLL_SECONDS, Failure, cause_of_end, say

# For the reason why a rank has aborted itself to show up.
_CAUSE_SECONDS = 5.0

_LAUNCHER = "PIPEOFFLOAD_LAUNCHER"


@contextmanager
def signing_as_launcher() -> Iterator[None]:
    """Give the processes that are started meanwhile the id of this one, their launcher."""
    os.environ[_LAUNCHER] = str(os.getpid())
    try:
        yield
    finally:
        os.environ.pop(_LAUNCHER, None)


class LaunchedProcesses:
    """The other processes of a machine, as one of them sees them.

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
        self._aborted_at: dict[int, float] = {}
        self._children = dict(enumerate(children, start=global_rank + 1))
        for thread in threading.enumerate():
            if isinstance(thread, _ChildProcessObserver):
                thread._child_processes = []

    def find_lost_launcher(self) -> Failure | None:
        """Return the failure of the process that launched this one, if it is gone."""
        if not self._launcher or os.getppid() == self._launcher:
            return None
        return Failure(f"global rank {self._first}, which is gone", is_gone=True)

    def find_ended_child(self, is_connecting: bool) -> Failure | None:
        """Return the failure of a child that should not have ended.

        Args:
            is_connecting: Whether the ranks have yet to connect: then none may end, not even with
                status 0; later a rank that is done may end a moment before the others.
        """
        for global_rank, child in self._children.items():
            has_ended = child.poll() is not None and (is_connecting or child.returncode)
            is_aborted = child.returncode == -signal.SIGABRT
            if has_ended and (not is_aborted or self._is_only_cause(global_rank)):
                return cause_of_end(child, global_rank)
        return None

    def _is_only_cause(self, global_rank: int) -> bool:
        """Whether no other failure has come up since a rank was first seen to have aborted.

        NCCL's watchdog aborts a rank that waits for one that is gone, maybe before that one is
        noticed.
        """
        first_seen = self._aborted_at.setdefault(global_rank, time.monotonic())
        return time.monotonic() - first_seen > _CAUSE_SECONDS

    @property
    def has_children(self) -> bool:
        """Whether this process launched others."""
        return bool(self._children)

    def kill(self, global_ranks: Sequence[int]) -> None:
        """Kill those of these ranks that this process launched."""
        for global_rank in global_ranks:
            if global_rank in self._children and not self.has_ended(global_rank):
                self._children[global_rank].send_signal(signal.SIGKILL)

    def kill_all(self) -> None:
        """Kill all ranks that this process launched."""
        self.kill(list(self._children))

    def kill_launcher(self) -> None:
        """Kill the process that launched this one, if it is still there."""
        if self._launcher and self.find_lost_launcher() is None:
            os.kill(self._launcher, signal.SIGKILL)

    def has_ended(self, global_rank: int) -> bool:
        """Whether that rank is known to have ended."""
        child = self._children.get(global_rank)
        return child is not None and child.poll() is not None


class BetweenRuns:
    """Watches the launched ranks between two calls of the trainer, in a thread of the launcher.

    When one of them ends badly, all end, as with Lightning's own launcher: the next call would wait
    for it for ever.
    """

    _current: ClassVar[BetweenRuns | None] = None

    def __init__(self, global_rank: int, launched: LaunchedProcesses) -> None:
        self.end()
        BetweenRuns._current = self
        self._global_rank, self._launched = global_rank, launched
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="between-runs", daemon=True).start()

    @classmethod
    def end(cls) -> None:
        """Stop watching: a run begins, whose failure board does."""
        if cls._current is not None:
            cls._current._is_over.set()
            cls._current = None

    def _watch(self) -> None:
        while not self._is_over.wait(POLL_SECONDS):
            failure = self._launched.find_ended_child(is_connecting=False)
            if failure is not None:
                say(f"global rank {self._global_rank} stops because of {failure.cause}")
                self._launched.kill_all()
                os._exit(failure.status)

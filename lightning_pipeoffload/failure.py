"""When one rank fails, all stop, and each says why.

The rank at fault writes what happened onto a board that every rank can read (the run's TCPStore)
and waits until they have. A thread of each rank reads it, because a rank that waits inside gloo or
NCCL runs no Python. What stops without a word (a killed process) is noticed by who talks to it, or
as its parent.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import (
    _ChildProcessObserver,  # private: what the board does in its place
)
from torch.distributed import (  # type: ignore[attr-defined] # exported at run time
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.constants import default_pg_timeout

log = logging.getLogger(__name__)

_FAILURE = "failure"
_SEEN = "seen/"
_POLL_SECONDS = 0.2
# The cause of a broken connection has this long to show up; who reports waits as long to be heard.
_GRACE_SECONDS = 5.0
# What all ranks refuse, each refuses by itself: then nobody stops because of another.
_OWN_ERROR_SECONDS = 1.0


@dataclass(frozen=True)
class Failure:
    """Why the run ends, as it stands on the board.

    Attributes:
        cause: one line that names the rank at fault.
        status: with which every rank ends.
    """

    cause: str
    status: int = 1

    def encode(self) -> str:
        """Return a value for the store."""
        return f"{self.status} {self.cause}"

    @classmethod
    def decode(cls, value: bytes) -> Failure:
        """Return what ``encode`` was given."""
        status, _, cause = value.decode().partition(" ")
        return cls(cause, int(status))


_RANK_ZERO_GONE = Failure("global rank 0, which is gone")


def connect_store(run: str, timeout: timedelta | None) -> Store:
    """Open another connection to the store that the process group was made with.

    Args:
        run: a name of this run; one process group may see several.
        timeout: how long to wait for a key that another rank sets.
    """
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timeout or default_pg_timeout,
    )
    return PrefixStore(f"pipeoffload/{run}", store)


class FailureBoard:
    """One rank's view of whether the run has failed.

    Args:
        store: a connection to the run's TCPStore that nothing else uses.
        global_rank: of this process.
        world_size: of the run.
        children: processes that this one launched, for the global ranks after its own.
    """

    def __init__(
        self,
        store: Store,
        global_rank: int,
        world_size: int,
        children: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        self._store = store
        self._global_rank = global_rank
        self._world_size = world_size
        self._children = children
        self._lock = threading.Lock()
        _retire_observer()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure-board", daemon=True)
        self._thread.start()

    def report(self, cause: str, status: int) -> None:
        """Tell all ranks that this one failed, and wait a little until they know.

        What another rank has said already, in the same words, is not said again: this process ends.

        Args:
            cause: one line: what happened and where.
            status: with which this process ends; the others take it over.
        """
        self.stop()
        try:
            failure = self._announce(f"global rank {self._global_rank}: {cause}", status)
            origin, _, said = failure.cause.partition(": ")
            if said == cause and origin != f"global rank {self._global_rank}":
                self._leave(failure)
            self._wait_until_seen()
            self._say_seen()
        except dist.DistError:
            log.debug("the run's store is gone, so nobody can be told", exc_info=True)
        _exit_soon(status)

    def stop_because_of_others(self, suspicion: str) -> NoReturn:
        """End this process because of another rank.

        Args:
            suspicion: what this rank saw, for when nobody says what happened.
        """
        self.stop()
        self._leave(self._find_failure(suspicion))

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            failure = self._look()
            if failure is not None and not self._stopped.wait(_OWN_ERROR_SECONDS):
                self._leave(failure)

    def _look(self) -> Failure | None:
        """Return why the run has failed, if it has."""
        try:
            if self._store.check([_FAILURE]):
                return Failure.decode(self._store.get(_FAILURE))
            for global_rank, child in enumerate(self._children, start=self._global_rank + 1):
                if child.poll() not in (None, 0):
                    how = _how_it_ended(child)
                    return self._announce(f"global rank {global_rank}, which {how}")
        except dist.DistError:
            return _RANK_ZERO_GONE
        return None

    def _announce(self, cause: str, status: int = 1) -> Failure:
        """Put a failure on the board, unless there is one already; return the one that is there."""
        announced = Failure(cause, status).encode()
        return Failure.decode(self._store.compare_set(_FAILURE, "", announced))

    def _find_failure(self, suspicion: str) -> Failure:
        """Return what the rank at fault says, or else put ``suspicion`` on the board."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline:
            failure = self._look()
            if failure is not None:
                return failure
            time.sleep(_POLL_SECONDS)
        try:
            return self._announce(suspicion)
        except dist.DistError:
            return _RANK_ZERO_GONE

    def _say_seen(self) -> None:
        """Let global rank 0, which hosts the store, end; this rank uses it no more."""
        self._store.set(f"{_SEEN}{self._global_rank}", "")

    def _wait_until_seen(self) -> None:
        others = [f"{_SEEN}{r}" for r in range(self._world_size) if r != self._global_rank]
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and not self._store.check(others):
            time.sleep(_POLL_SECONDS)

    def _leave(self, failure: Failure) -> NoReturn:
        with self._lock:
            say(f"global rank {self._global_rank} stops because of {failure.cause}")
            try:
                self._say_seen()
                if self._global_rank == 0:  # it hosts the store
                    self._wait_until_seen()
            except dist.DistError:
                log.debug("the run's store is gone", exc_info=True)
            # Not sys.exit: the main thread may wait inside gloo or NCCL for ever.
            os._exit(failure.status)


def _retire_observer() -> None:
    """End Lightning's thread that kills this process, without a word, when a child has failed."""
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []


def _how_it_ended(child: subprocess.Popen[bytes]) -> str:
    if child.returncode < 0:
        return f"was killed by {signal.Signals(-child.returncode).name}"
    return f"ended with status {child.returncode}"


def say(line: str) -> None:
    """Write one line to standard error."""
    sys.stderr.write(f"[pipeoffload] {line}\n")
    sys.stderr.flush()


def _exit_soon(status: int) -> None:
    """End this process even if something holds up its regular end."""
    timer = threading.Timer(_GRACE_SECONDS, os._exit, (status,))
    timer.daemon = True
    timer.start()

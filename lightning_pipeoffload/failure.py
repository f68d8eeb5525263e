"""When one rank fails, all stop, and each says why.

The rank at fault writes what happened onto a board that every rank can read (the run's TCPStore)
and waits until they have. A thread of each rank reads it, because a rank that waits inside gloo or
NCCL runs no Python. What stops without a word (a killed process) is noticed by who talks to it, or
by the machine's other processes, which watch each other already while the ranks connect.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined] # exported at run time
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.constants import default_pg_timeout

from lightning_pipeoffload.failure_cause import Failure, describe
from lightning_pipeoffload.launched import LaunchedProcesses

log = logging.getLogger(__name__)

_FAILURE = "failure"
_SEEN = "seen/"
_POLL_SECONDS = 0.2
# The cause of a broken connection has this long to show up: a core may stand still for a while.
_CAUSE_SECONDS = 15.0
# Who has told waits so long to be heard.
_HEARD_SECONDS = 30.0
# So long the rank at fault may take to print its traceback and end.
_END_SECONDS = 15.0
# What all ranks refuse, each refuses by itself: then nobody stops because of another.
_OWN_ERROR_SECONDS = 1.0
# Ranks of one machine connect within seconds.
_PATIENCE_SECONDS = 30.0

_RANK_ZERO_GONE = Failure("global rank 0, which is gone", is_deaf=True)


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

    Until :meth:`connect`, when the ranks cannot talk yet, it sees the machine's processes alone.

    Args:
        global_rank: of this process.
        world_size: of the run.
        launched: the other processes of this machine.

    Attributes:
        also_look: called with the store whenever this rank looks at it and nothing has failed.
    """

    also_look: Callable[[Store], None] = staticmethod(lambda store: None)

    def __init__(self, global_rank: int, world_size: int, launched: LaunchedProcesses) -> None:
        self._store: Store | None = None
        self._global_rank = global_rank
        self._world_size = world_size
        self._launched = launched
        self._is_ending = False
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failure-board", daemon=True)
        self._thread.start()

    def connect(self, store: Store) -> None:
        """From now on see what the other ranks write.

        Args:
            store: a connection to the run's TCPStore that nothing else uses.
        """
        self._store = store

    def report(self, exception: BaseException, place: str, status: int) -> None:
        """Tell all ranks that this one failed, and wait a little until they know.

        What another rank has said already, in the same words, is not said again: this process ends.

        Args:
            exception: what happened.
            place: where in the plan; empty between steps.
            status: with which this process ends; the others take it over.
        """
        self.stop()
        cause = describe(exception) + (f" (in {place})" if place else "")
        try:
            failure = self._announce(Failure(f"global rank {self._global_rank}: {cause}", status))
            origin, _, said = failure.cause.partition(": ")
            if said == cause and origin != f"global rank {self._global_rank}":
                self._leave(failure, quietly=failure.is_interrupt)
            if isinstance(exception, SystemExit):  # Python prints nothing of it
                say(f"global rank {self._global_rank} stops: {cause}")
            self._wait_until_seen(failure)
            self._say_seen()
        except dist.DistError:
            log.debug("the run's store is gone, so nobody can be told", exc_info=True)
        _exit_soon(exception, status)

    def stop_because_of_others(self, suspicion: str) -> NoReturn:
        """End this process because of another rank.

        Args:
            suspicion: what this rank saw, for when nobody says what happened.
        """
        self.stop()
        self._leave(self._find_failure(suspicion))

    def expect_end(self) -> None:
        """From now on a rank that is gone is one that is done."""
        self._is_ending = True

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def _watch(self) -> None:
        wait_is_long = time.monotonic() + _PATIENCE_SECONDS
        while not self._stopped.wait(_POLL_SECONDS):
            failure = self._look()
            if failure is not None and not self._stopped.wait(_OWN_ERROR_SECONDS):
                self._leave(failure)
            if self._store is None and time.monotonic() > wait_is_long:
                wait_is_long = float("inf")
                self._say_waiting()

    def _look(self) -> Failure | None:
        """Return why the run has failed, if it has."""
        lost = self._launched.find_lost_launcher()
        if self._store is None:
            return lost or self._launched.find_ended_child(is_connecting=True)
        try:
            # torch complains at length about a store that is gone: leave it alone.
            if lost != _RANK_ZERO_GONE and self._store.check([_FAILURE]):
                return Failure.decode(self._store.get(_FAILURE))
            failure = lost or self._launched.find_ended_child(is_connecting=False)
            if failure is None:
                self.also_look(self._store)
            return None if failure is None or self._is_ending else self._announce(failure)
        except dist.DistError:
            return None if self._is_ending else _RANK_ZERO_GONE

    def _announce(self, failure: Failure) -> Failure:
        """Put a failure on the board, unless there is one already; return the one that is there."""
        if self._store is None or failure == _RANK_ZERO_GONE:
            return failure
        return Failure.decode(self._store.compare_set(_FAILURE, "", failure.encode()))

    def _find_failure(self, suspicion: str) -> Failure:
        """Return what the rank at fault says, or else put ``suspicion`` on the board."""
        self._is_ending = False
        for _ in _polls(_CAUSE_SECONDS):
            failure = self._look()
            if failure is not None:
                return failure
        try:
            return self._announce(Failure(suspicion, is_deaf=True))
        except dist.DistError:
            return _RANK_ZERO_GONE

    def _say_seen(self) -> None:
        """Let global rank 0, which hosts the store, end; this rank uses it no more."""
        if self._store is not None:
            self._store.set(f"{_SEEN}{self._global_rank}", "")

    def _wait_until_seen(self, failure: Failure) -> None:
        for _ in _polls(_HEARD_SECONDS):
            if self._is_seen(failure):
                return

    def _is_seen(self, failure: Failure) -> bool:
        """Whether all ranks have seen it that can."""
        if self._store is None:
            return True
        others = [r for r in range(self._world_size) if r != self._global_rank]
        alive = [r for r in others if not self._launched.has_ended(r)]
        num_unseen = sum(not self._store.check([f"{_SEEN}{r}"]) for r in alive)
        # One of them is gone, and which is not known: it is on another machine.
        return num_unseen <= (failure.is_deaf and alive == others)

    def _leave(self, failure: Failure, quietly: bool = False) -> NoReturn:
        # Who has pressed Ctrl-C knows why: one rank says it.
        quietly = quietly or (failure.is_interrupt and self._global_rank != 0)
        with self._lock:
            if not quietly:
                say(f"global rank {self._global_rank} stops because of {failure.cause}")
            try:
                if failure != _RANK_ZERO_GONE:
                    self._say_seen()
                if self._global_rank == 0:  # it hosts the store
                    self._wait_until_seen(failure)
            except dist.DistError:
                log.debug("the run's store is gone", exc_info=True)
            # Not sys.exit: the main thread may wait inside gloo or NCCL for ever.
            os._exit(failure.status)

    def _say_waiting(self) -> None:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        say(
            f"global rank {self._global_rank} still waits for all {self._world_size} ranks to "
            f"connect to {where}; are they all started?"
        )


def _polls(seconds: float) -> Iterator[None]:
    """Yield every now and then, for as long as ranks wait for each other's last words, or an end.

    Counted, not timed: where a machine stands still for a while, all ranks get the same chances.
    """
    for _ in range(max(1, round(seconds / _POLL_SECONDS))):
        yield
        time.sleep(_POLL_SECONDS)


def say(line: str) -> None:
    """Write one line to standard error."""
    sys.stderr.write(f"[pipeoffload] {line}\n")
    sys.stderr.flush()


def _exit_soon(exception: BaseException, status: int) -> None:
    """End this process even if something holds up its regular end."""

    def exit_in_the_end() -> None:
        for _ in _polls(_END_SECONDS):
            pass
        # Python keeps here what it has printed at the end of a script.
        if getattr(sys, "last_value", None) is not exception:
            traceback.print_exception(exception)
            sys.stderr.flush()
        os._exit(status)

    threading.Thread(target=exit_in_the_end, name="failure-end", daemon=True).start()

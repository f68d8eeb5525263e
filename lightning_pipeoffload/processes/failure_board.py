"""When one rank fails, all stop, and each says why.

The rank at fault writes what happened onto a board that every rank can read (the run's TCPStore)
and waits until they have. A thread of each rank reads it, because a rank that waits inside gloo or
NCCL runs no Python. What stops without a word (a killed process) is noticed by who talks to it, or
by the machine's other processes, which watch each other already while the ranks connect::

    rank at fault   main thread: report() -> "rank 2: ..."    waits until seen    ends
                                               v
    store           ......................... the cause ..... seen by 0, 1, 3
                                               v
    other ranks     thread: looks . . looks . reads it, says why, ends this process
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time
from torch.distributed.constants import default_pg_timeout

from lightning_pipeoffload.processes.failure_cause import (
    Failure,
    describe,
    is_cut_off,
    name_place,
    without_answer,
)
from lightning_pipeoffload.processes.failure_notes import FailureNotes
from lightning_pipeoffload.processes.last_words import (
    POLL_SECONDS,
    exit_soon,
    polls,
    say,
    say_instead,
    say_waiting,
)
from lightning_pipeoffload.processes.siblings import LaunchedProcesses

log = logging.getLogger(__name__)

# The cause of a broken connection has this long to show up: a core may stand still for a while.
_CAUSE_SECONDS = 5.0
# Who has told waits so long to be heard.
_HEARD_SECONDS = 30.0
# What all ranks refuse, each refuses by itself: then nobody stops because of another.
_OWN_ERROR_SECONDS = 1.0
# A thread that is asked to end does so at its next look, unless the store does not answer.
_LAST_LOOK_SECONDS = 5.0
# Ranks of one machine connect within seconds.
_PATIENCE_SECONDS = 30.0

_RANK_ZERO_GONE = Failure("global rank 0, which is gone", is_deaf=True)


class FailureBoard:
    """One rank's view of whether the run has failed.

    Until :meth:`connect`, when the ranks cannot talk yet, it sees the machine's processes alone.

    Args:
        global_rank: The global rank of this process.
        world_size: The world size of the run.
        launched: The other processes of this machine.
        timeout: How long global rank 0, which hosts the store, may leave this rank without answer.

    Attributes:
        also_look: Functions that are called with the store whenever this rank looks at it and
            nothing has failed; they return why the run is to end, if it is.
        place_of: A function that says where in the pipelines a global rank is; empty: nowhere.
    """

    also_look: Sequence[Callable[[Store], str | None]] = ()
    place_of: Callable[[int], str] = staticmethod(lambda global_rank: "")

    def __init__(
        self,
        global_rank: int,
        world_size: int,
        launched: LaunchedProcesses,
        timeout: timedelta | None = None,
    ) -> None:
        self._notes: FailureNotes | None = None
        self._global_rank = global_rank
        self._world_size = world_size
        self._launched = launched
        self._timeout = timeout or default_pg_timeout
        self._is_ending = False
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._is_over = threading.Event()
        self._num_looks = 0
        self._threads: list[threading.Thread] = []
        self._start(self._watch)

    def connect(self, store: Store) -> None:
        """From now on see what the other ranks write.

        Args:
            store: A connection to the run's TCPStore that nothing else uses.
        """
        self._notes = FailureNotes(store, self._global_rank, self._world_size)
        if self._global_rank != 0:
            self._start(self._guard)

    def report(self, exception: BaseException, place: str, status: int) -> bool:
        """Tell all ranks that this one failed, and wait a little until they know.

        What another rank has said already, in the same words, is not said again: this process ends.

        Args:
            exception: What happened.
            place: The place in the plan, such as "stage 3, B of microbatch 5"; empty between steps.
            status: The exit status of this process; the others take it over.

        Returns:
            Whether every rank has raised the same, and goes on; else this process ends soon.
        """
        with self._lock:  # or else this process is ending because of another
            self._stopped.set()
        if place:
            say(f"{self._name} failed in {place}")
        cause = describe(exception)
        told = cause + (f" (in {place})" if place else "")
        failure = Failure(f"{self._name}: {told}", status)
        try:
            failure = self._announce(failure)
            if isinstance(exception, Exception) and self._all_raise(cause):
                self._go_on(exception, failure)
                return True
            origin, _, said = failure.cause.partition(": ")
            if said == told and origin != self._name:
                self._leave(failure, quietly=failure.is_interrupt)
            if isinstance(exception, SystemExit):  # Python prints nothing of it
                say(f"{self._name} stops: {told}")
            self._say_seen()
            self._wait_until_seen(failure)
        except dist.DistError:
            log.debug("the run's store is gone, so nobody can be told", exc_info=True)
        self.stop()
        exit_soon(exception, status)
        return False

    def fail(self, exception: BaseException, where: str) -> NoReturn:
        """End the run because of what another thread of this rank has met.

        Args:
            exception: What happened.
            where: What the thread does, in words.
        """
        traceback.print_exception(exception)
        failure = Failure(f"{self._name}: {describe(exception)} ({where})")
        try:
            failure = self._announce(failure)
        except dist.DistError:
            failure = _RANK_ZERO_GONE
        self._leave(failure)

    def stop_because_of_others(self, suspicion: str) -> NoReturn:
        """End this process because of another rank.

        Args:
            suspicion: What this rank saw, for when nobody says what happened.
        """
        with self._lock:
            self._stopped.set()
        self._leave(self._find_failure(suspicion))

    def expect_end(self) -> None:
        """Take a rank that is gone for one that is done, from now on."""
        self._is_ending = True

    def stop(self) -> None:
        """Watch no longer.

        The threads have ended then: one that Python's end finds within a call of torch would abort
        the process, and a run that has succeeded would end with a bad status.
        """
        self._stopped.set()
        self._is_over.set()
        for thread in self._threads:
            thread.join(_LAST_LOOK_SECONDS)

    @property
    def _name(self) -> str:
        return f"global rank {self._global_rank}"

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:  # nobody would notice another rank's end
                self.fail(error, "while watching the other ranks")

        thread = threading.Thread(target=run, name="failure-board", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watch(self) -> None:
        wait_is_long = time.monotonic() + _PATIENCE_SECONDS
        while not self._stopped.wait(POLL_SECONDS):
            failure = self._look()
            if failure is not None and not self._has_own_error():
                with self._lock:
                    if not self._stopped.is_set():  # by an error of this rank's own
                        self._leave(failure)
            if self._notes is None and time.monotonic() > wait_is_long:
                wait_is_long = float("inf")
                say_waiting(self._name, self._world_size)

    def _has_own_error(self) -> bool:
        num_polls = round(_OWN_ERROR_SECONDS / POLL_SECONDS)
        return any(self._stopped.wait(POLL_SECONDS) for _ in range(num_polls))

    def _guard(self) -> None:
        """End this process when a look at the store has taken as long as the timeout."""
        num_polls, looked = 0, -1
        while not self._is_over.wait(POLL_SECONDS):
            num_polls = num_polls + 1 if looked == self._num_looks else 0
            looked = self._num_looks
            if num_polls * POLL_SECONDS > self._timeout.total_seconds():
                say(f"{self._name} stops because of global rank 0, which does not answer")
                self._launched.kill_launcher()
                os._exit(1)

    def _look(self) -> Failure | None:
        """Return why the run has failed, if it has."""
        failure = self._look_at_all()
        self._num_looks += 1
        return failure

    def _look_at_all(self) -> Failure | None:
        lost = self._launched.find_lost_launcher()
        if self._notes is None:
            return lost or self._launched.find_ended_child(is_connecting=True)
        try:
            # torch complains at length about a store that is gone: leave it alone.
            told = self._notes.read() if lost != _RANK_ZERO_GONE else None
            if told is not None:
                return told
            failure = lost or self._launched.find_ended_child(is_connecting=False)
            if failure is None:
                causes = (look(self._notes.store) for look in self.also_look)
                failure = next((Failure(cause) for cause in causes if cause), None)
            return None if failure is None or self._is_ending else self._announce(failure)
        except dist.DistError:
            return None if self._is_ending else _RANK_ZERO_GONE

    def _announce(self, failure: Failure) -> Failure:
        """Put a failure on the board, unless there is one already; return the one that is there."""
        if self._notes is None or failure == _RANK_ZERO_GONE:
            return failure
        return self._notes.announce(failure)

    def _all_raise(self, cause: str) -> bool:
        """Whether every rank has raised the same by itself; wait for those that have yet to."""
        if self._notes is None:
            return False
        self._notes.say_raised(cause)
        for _ in self._polls(_HEARD_SECONDS):
            ended = [r for r in range(self._world_size) if self._launched.has_ended(r)]
            found = self._notes.all_raise(cause, ended)
            if found is not None:
                return found
        return False

    def _go_on(self, exception: Exception, failure: Failure) -> None:
        """Let the exception reach the caller; where nobody catches it, it is shown once."""
        self._say_seen()
        if self._global_rank == 0:  # it may end at once, and it hosts the store
            self._wait_until_seen(failure)
        self.stop()
        if not failure.cause.startswith(f"{self._name}:"):
            say_instead(exception, f"{self._name} stops because of {failure.cause}")

    def _find_failure(self, suspicion: str) -> Failure:
        """Return what the rank at fault says, or put down who does not answer or is suspected."""
        self._is_ending = False
        if self._notes is None:
            return self._find_failure_unconnected(suspicion)
        try:
            found = self._call_roll(is_cut_off(suspicion))
            if isinstance(found, Failure):
                return found
            cause = without_answer(found, suspicion) if found else suspicion
            return self._announce(Failure(cause, is_deaf=True))
        except dist.DistError:
            return _RANK_ZERO_GONE

    def _find_failure_unconnected(self, suspicion: str) -> Failure:
        for _ in self._polls(_CAUSE_SECONDS):
            failure = self._look()
            if failure is not None:
                return failure
        self._launched.kill_all()  # one of them has not come in all this time
        return Failure(suspicion)

    def _call_roll(self, is_cut_off: bool) -> Failure | list[int]:
        """Return the failure that shows up meanwhile, or who has not answered in the end."""
        assert self._notes is not None
        self._notes.call_roll()
        absent: list[int] = []
        for number, _ in enumerate(self._polls(_CAUSE_SECONDS)):
            failure = self._look()
            if failure is not None:
                return failure
            absent = self._notes.absent() or []
            if is_cut_off and absent and number * POLL_SECONDS >= _OWN_ERROR_SECONDS:
                break
        return absent

    def _say_seen(self) -> None:
        if self._notes is not None:
            self._notes.say_seen()

    def _wait_until_seen(self, failure: Failure) -> None:
        """Wait until all ranks have seen it that can; end those launched here that cannot."""
        for _ in self._polls(_HEARD_SECONDS):
            if not self._unseen(failure):
                break
        if self._notes is not None:
            self._launched.kill(self._notes.unseen())

    def _unseen(self, failure: Failure) -> list[int]:
        if self._notes is None:
            return []
        others = self._notes.unseen()
        alive = [rank for rank in others if not self._launched.has_ended(rank)]
        absent = self._notes.absent() if failure.is_deaf else None
        if absent is not None:
            return [rank for rank in alive if rank not in absent]
        # One of them is gone, and which is not known: it is on another machine.
        return alive[1:] if failure.is_deaf and alive == others else alive

    def _polls(self, seconds: float) -> Iterator[None]:
        for _ in polls(seconds):
            yield
            self._num_looks += 1

    def _leave(self, failure: Failure, quietly: bool = False) -> NoReturn:
        # Who has pressed Ctrl-C knows why: one rank says it.
        quietly = quietly or (failure.is_interrupt and self._global_rank != 0)
        with self._lock:
            if not quietly:
                cause = name_place(failure, self.place_of)
                say(f"{self._name} stops because of {cause}")
            try:
                if failure != _RANK_ZERO_GONE:
                    self._say_seen()
                if self._global_rank == 0 or self._launched.has_children:  # the store's host, say
                    self._wait_until_seen(failure)
            except dist.DistError:
                log.debug("the run's store is gone", exc_info=True)
            # Not sys.exit: the main thread may wait inside gloo or NCCL for ever.
            os._exit(failure.status)

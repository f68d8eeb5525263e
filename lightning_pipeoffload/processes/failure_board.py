"""The protocol by which all ranks of a run exit when one of them fails.

A thread of each rank reads and writes the run's store, because the main thread may wait inside gloo
or NCCL, where it runs no Python. The main thread passes its own failure to this thread, and waits.

Rank 2 raises an exception::

    rank 2   report() > failure, raised/2, seen/2     all seen/*: prints its traceback, exits
    store               failure
    others              poll .. read failure, write seen/RANK, say it, exit

Rank 1 is killed on another machine, and rank 0 waits for a message from it::

    rank 0   exit_for_lost_rank() > roll   2, 3 present: failure = "global rank 1, which is gone"
    others                    present/RANK .. read failure, write seen/RANK, say it, exit

====================  ===========================  ===============================
key                   written by                   read by
====================  ===========================  ===============================
``failure``: a cause  the first to find one, once  every rank in its turn
``raised/RANK``       a rank that raises an error  ranks that raise an error too
``alike``: 0 or 1     the first to know if all     ranks that raise an error too
                      have raised the same
``seen/RANK``         a rank that knows the cause  rank at fault; the store's host
``done/RANK``         a rank that reads no more    the store's host, before it exits
``roll``              a rank that has lost others  every rank in its turn
``present/RANK``      a rank that has read roll    ranks that have lost others
====================  ===========================  ===============================

A killed process writes nothing. The process that launched it sees its exit status, the ranks that
communicate with it over gloo get an error, and the machine before it a closed connection
(``next_machine.py``).
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import ceil
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time
from torch.distributed.constants import default_pg_timeout

from lightning_pipeoffload.processes.failure import (
    POLL_SECONDS,
    Failure,
    describe,
    describe_absent_ranks,
    exit_after_delay,
    polls,
    print_error_line,
    print_traceback,
    replace_uncaught_traceback,
    says_connection_ended,
)
from lightning_pipeoffload.processes.launcher import LaunchedProcesses
from lightning_pipeoffload.processes.next_machine import NextMachineConnection

log = logging.getLogger(__name__)

# Timeout for the cause of a broken connection to be announced: a core may stall for a while.
_CAUSE_SECONDS = 5.0
# Timeout for all ranks to acknowledge a failure.
_SEEN_SECONDS = 30.0
# Timeout for other ranks to raise an error too: all may raise the same.
_OWN_ERROR_SECONDS = 1.0
# Timeout for the thread to end, at its next poll unless the store does not answer.
_LAST_POLL_SECONDS = 5.0
# Timeout for the ranks of one machine to connect.
_CONNECT_SECONDS = 30.0
# So many ranks read the store at every poll. More take turns, so that global rank 0 has no more
# requests to answer: torch's wait for a key would need none, but prints at every timeout, and a
# long trace where that rank is gone.
_RANKS_AT_ONCE = 64

_RANK_ZERO_GONE = Failure("global rank 0, which is gone", is_gone=True)
_ADDRESS = re.compile(r"0x[0-9a-f]+")


class FailureBoard:
    """One rank's side of the protocol. Until :meth:`connect` it watches local processes only.

    Args:
        global_rank: The global rank of this process.
        world_size: The world size of the run.
        launched: The other processes of this machine.
        timeout: The longest time without an answer of global rank 0, which hosts the store.
    """

    def __init__(
        self,
        global_rank: int,
        world_size: int,
        launched: LaunchedProcesses,
        timeout: timedelta | None = None,
    ) -> None:
        self._store: Store | None = None
        self._next_machine: NextMachineConnection | None = None
        self._describe_rank: Callable[[int], str] = lambda global_rank: ""
        self._added_polls: tuple[Callable[[Store], str | None], ...] = ()
        self._global_rank = global_rank
        self._name = f"global rank {global_rank}"
        self._world_size = world_size
        self._others = [rank for rank in range(world_size) if rank != global_rank]
        self._launched = launched
        self._timeout = timeout or default_pg_timeout
        self._is_ending = False
        self._num_polls = 0
        self._polls_a_turn = ceil(world_size / _RANKS_AT_ONCE)
        self._has_task, self._is_over = threading.Event(), threading.Event()
        self._task: Callable[[], bool] = bool
        self._result = False
        self._thread = threading.Thread(target=self._work, name="failure-board", daemon=True)
        self._thread.start()

    # Called by the main thread

    def connect(self, store: Store, describe_rank: Callable[[int], str] | None = None) -> None:
        """Use ``store`` from now on, a connection that no other code uses.

        Args:
            store: The store.
            describe_rank: Returns the replica and stages of a global rank, or ""; None: always "".
        """
        self._describe_rank = describe_rank or self._describe_rank
        following = self._launched.first_rank_of_next_machine(self._world_size)
        self._next_machine = NextMachineConnection(store, self._global_rank, following)
        self._store = store
        if self._global_rank != 0:
            threading.Thread(
                target=self._exit_on_store_timeout, name="failure-guard", daemon=True
            ).start()

    def add_poll(self, poll: Callable[[Store], str | None]) -> None:
        """Call ``poll`` in the thread when it reads the store, before a failure.

        It returns a reason to end the run, or None.
        """
        self._added_polls = (*self._added_polls, poll)

    def report(self, exception: BaseException, action: str, status: int) -> bool:
        """Report a failure of this rank, and wait until all ranks have acknowledged it.

        If another rank has reported the same message, this process exits without repeating it.

        Args:
            exception: The exception that this rank has raised.
            action: What runs, such as "stage 3, B of microbatch 5"; empty between steps.
            status: The exit status of this process; the other ranks exit with it too.

        Returns:
            Whether every rank has raised the same and may continue; else this process exits soon.
        """
        return self._run_in_thread(lambda: self._report(exception, action, status))

    def exit_for_thread_failure(self, exception: BaseException, doing: str) -> None:
        """End the run because another thread of this rank has failed while ``doing`` something."""
        self._run_in_thread(lambda: self._fail(exception, doing))

    def exit_for_lost_rank(self, suspicion: str) -> None:
        """End this process because another rank is lost.

        Args:
            suspicion: The error of this rank; reported if no other cause is found.
        """
        self._run_in_thread(lambda: self._exit(self._find_failure(suspicion)))

    def expect_end(self) -> None:
        """From now on treat the end of a rank as regular."""
        self._is_ending = True

    def stop(self) -> None:
        """Stop watching.

        It waits for the thread: a thread inside a call of torch at the interpreter's exit aborts
        the process, and a successful run would end with a bad status.
        """
        self._is_over.set()
        self._has_task.set()
        self._thread.join(_LAST_POLL_SECONDS)
        self._close()

    def _run_in_thread(self, task: Callable[[], bool]) -> bool:
        self._task = task
        self._has_task.set()
        self._thread.join()
        self._is_over.set()
        self._close()
        return self._result

    def _close(self) -> None:
        if self._next_machine is not None:
            self._next_machine.close()

    # The thread

    def _work(self) -> None:
        try:
            self._watch()
            self._result = self._task()
        except Exception as error:  # else nobody would notice the end of another rank
            self._fail(error, "while watching the other ranks")

    def _watch(self) -> None:
        """Poll until the main thread has a task; exit if the run has failed."""
        late_at = time.monotonic() + _CONNECT_SECONDS
        while not self._has_task.wait(POLL_SECONDS):
            is_turn = (self._num_polls + self._global_rank) % self._polls_a_turn == 0
            failure = self._poll(reads=is_turn)
            if failure is not None and not self._wait_for_own_error():
                self._exit(failure)
            if self._store is None and time.monotonic() > late_at:
                late_at = float("inf")
                address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                print_error_line(
                    f"{self._name} still waits for all {self._world_size} ranks to connect to "
                    f"{address}; are they all started?"
                )

    def _wait_for_own_error(self) -> bool:
        num_polls = round(_OWN_ERROR_SECONDS / POLL_SECONDS)
        return any(self._has_task.wait(POLL_SECONDS) for _ in range(num_polls))

    def _poll(self, reads: bool = True) -> Failure | None:
        """Return the failure of the run, as far as this machine knows it or the store is read."""
        failure = self._find_and_announce_failure(reads)
        self._num_polls += 1
        return failure

    def _find_and_announce_failure(self, reads: bool) -> Failure | None:
        lost = self._launched.find_launcher_failure()
        if self._store is None:
            return lost or self._launched.find_child_failure(is_connecting=True)
        try:
            # torch prints long messages about a store that is gone, so it is not read then.
            reads = reads and lost != _RANK_ZERO_GONE
            failure = self._read(self._store) if reads else None
            if failure is not None:
                return failure
            failure = lost or self._launched.find_child_failure(is_connecting=False)
            if failure is None and reads:
                failure = self._find_ended_machine(self._store)
            if failure is None and reads:
                causes = (poll(self._store) for poll in self._added_polls)
                failure = next((Failure(cause) for cause in causes if cause), None)
            return None if failure is None or self._is_ending else self._announce(failure)
        except dist.DistError:
            return None if self._is_ending else _RANK_ZERO_GONE

    def _find_ended_machine(self, store: Store) -> Failure | None:
        ended = None if self._next_machine is None else self._next_machine.find_ended(store)
        return (
            None if ended is None else Failure(f"global rank {ended}, which is gone", is_gone=True)
        )

    def _read(self, store: Store) -> Failure | None:
        has_failure = store.check(["failure"])
        if has_failure or store.check(["roll"]):  # a rank that knows the failure is present too
            store.set(f"present/{self._global_rank}", "")
        return Failure.decode(store.get("failure")) if has_failure else None

    def _announce(self, failure: Failure) -> Failure:
        """Write the failure unless the store has one; return the failure in the store."""
        if self._store is None or failure == _RANK_ZERO_GONE:
            return failure
        return Failure.decode(self._store.compare_set("failure", "", failure.encode()))

    def _exit_on_store_timeout(self) -> None:
        """Exit when a poll of the store takes as long as the timeout; runs in another thread."""
        num_waits, seen = 0, -1
        while not self._is_over.wait(POLL_SECONDS):
            num_waits = num_waits + 1 if seen == self._num_polls else 0
            seen = self._num_polls
            if num_waits * POLL_SECONDS > self._timeout.total_seconds():
                self._launched.kill_launcher()
                print_error_line(
                    f"{self._name} stops because of global rank 0, which does not answer"
                )
                os._exit(1)

    # Tasks of the thread: this rank has failed

    def _report(self, exception: BaseException, action: str, status: int) -> bool:
        error = describe(exception)
        cause = error + (f" (in {action})" if action else "")
        failure = Failure(f"{self._name}: {cause}", status)
        with self._unless_store_is_gone():
            try:
                with self._saying_if_late(cause):
                    failure = self._announce(failure)
            finally:
                if action:
                    print_error_line(f"{self._name} failed in {action}")
            if isinstance(exception, Exception) and self._agree_on_common_error(error):
                self._propagate_common_error(exception, failure)
                return True
            origin, _, reported = failure.cause.partition(": ")
            if reported == cause and origin != self._name:
                self._exit(failure)
            # Neither prints anything by itself; of ranks that are not connected, one is enough.
            is_first = self._store is not None or self._global_rank == 0
            if isinstance(exception, SystemExit) or (failure.is_interrupt and is_first):
                print_error_line(f"{self._name} stops: {cause}")
            self._acknowledge("seen")
            self._wait_until_seen(failure)
            self._acknowledge("done")
        exit_after_delay(exception, status)
        return False

    @contextmanager
    def _saying_if_late(self, cause: str) -> Iterator[None]:
        """Say the cause before it is announced where the store does not answer for seconds."""
        line = f"{self._name} stops: {cause}; global rank 0, which the others would read it from, "
        timer = threading.Timer(_CAUSE_SECONDS, print_error_line, [f"{line}does not answer yet"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _agree_on_common_error(self, error: str) -> bool:
        """Wait until it is known whether every rank has raised the same error."""
        store = self._store
        if store is None:
            return False
        mine = _ADDRESS.sub("0x", error)
        store.set(f"raised/{self._global_rank}", mine)
        alike = self._compare_errors(store, mine)
        # The first rank to know decides for all: one that went on alone would lose the others.
        return store.compare_set("alike", "", f"{alike:d}") == b"1"

    def _compare_errors(self, store: Store, mine: str) -> bool:
        silent = [*self._others]
        for _ in self._counted_polls(_SEEN_SECONDS):
            if store.check(["alike"]):
                return store.get("alike") == b"1"
            for rank in [*silent]:
                # Asked first: a rank writes ``raised`` before it writes ``seen``, and ends.
                has_left = self._launched.has_ended(rank) or store.check([f"seen/{rank}"])
                if not store.check([f"raised/{rank}"]):
                    if has_left:
                        return False
                elif store.get(f"raised/{rank}") == mine.encode():
                    silent.remove(rank)
                else:
                    return False
            if not silent:
                return True
        return False

    def _propagate_common_error(self, exception: Exception, failure: Failure) -> None:
        """Let the exception propagate; if it is not caught, only one rank prints it."""
        self._acknowledge("seen")
        self._acknowledge("done")
        if self._global_rank == 0:  # it may exit at once, and it hosts the store
            self._wait_until_seen(failure)
        if not failure.cause.startswith(f"{self._name}:"):
            replace_uncaught_traceback(exception, f"{self._name} stops because of {failure.cause}")

    def _fail(self, exception: BaseException, doing: str) -> NoReturn:
        try:
            failure = self._announce(Failure(f"{self._name}: {describe(exception)} ({doing})"))
        except dist.DistError:
            failure = _RANK_ZERO_GONE
        print_traceback(exception)
        self._exit(failure)

    # Tasks of the thread: another rank has failed

    def _find_failure(self, suspicion: str) -> Failure:
        """Return the announced failure; else one with the silent ranks, or ``suspicion``.

        A rank that waits for messages may detect the loss before the rank at fault, or the process
        that launched it, has announced the cause.
        """
        self._is_ending = False
        turn = (self._polls_a_turn - 1) * POLL_SECONDS  # until every rank has read the store
        if self._store is None:
            for _ in self._counted_polls(_CAUSE_SECONDS):
                failure = self._poll()
                if failure is not None:
                    return failure
            self._launched.kill_all()  # one of them has not connected in all this time
            return Failure(suspicion)
        try:
            failure = self._poll()
            if failure is not None:
                return failure
            self._store.set("roll", "")
            absent: list[int] = []
            for number, _ in enumerate(self._counted_polls(_CAUSE_SECONDS + turn)):
                failure = self._poll()
                if failure is not None:
                    return failure
                absent = self._ranks_without("present")
                is_late = number * POLL_SECONDS >= _OWN_ERROR_SECONDS + turn
                if absent and is_late and says_connection_ended(suspicion):
                    break
            cause = describe_absent_ranks(absent, suspicion) if absent else suspicion
            return self._announce(Failure(cause, is_gone=True))
        except dist.DistError:
            return _RANK_ZERO_GONE

    def _exit(self, failure: Failure) -> NoReturn:
        if failure == _RANK_ZERO_GONE:
            self._store = None
        try:
            with self._unless_store_is_gone():
                self._acknowledge("seen")  # first: the reader of standard error may stand still
            # After a Ctrl-C the line of the rank that has announced it is enough.
            if not failure.is_interrupt or (failure.is_gone and self._global_rank == 0):
                cause = failure.cause_with_stage(self._describe_rank)
                print_error_line(f"{self._name} stops because of {cause}")
            with self._unless_store_is_gone():
                if self._global_rank == 0 or self._launched.has_children:  # the store's host, say
                    self._wait_until_seen(failure)
                self._acknowledge("done")
        finally:
            # Not sys.exit: the main thread may wait inside gloo or NCCL for ever.
            os._exit(failure.status)

    # Acknowledgements

    @contextmanager
    def _unless_store_is_gone(self) -> Iterator[None]:
        """Read and write no more where the store is gone: torch prints a trace each time."""
        try:
            yield
        except dist.DistError:
            log.debug("the run's store is gone", exc_info=True)
            self._store = None

    def _acknowledge(self, key: str) -> None:
        if self._store is not None:
            self._store.set(f"{key}/{self._global_rank}", "")

    def _wait_until_seen(self, failure: Failure) -> None:
        """Wait until all live ranks have acknowledged the failure; kill local ones that do not.

        Such a rank may be stopped for ever. Global rank 0, which hosts the store, waits until no
        rank reads it any more: torch prints a long trace in a rank that does.
        """
        if self._store is None:
            return
        key = "done" if self._global_rank == 0 else "seen"
        for _ in self._counted_polls(_SEEN_SECONDS):
            if not self._awaited(failure, key):
                break
        self._launched.kill(self._ranks_without(key))

    def _awaited(self, failure: Failure, key: str) -> list[int]:
        unseen = self._ranks_without(key)
        alive = [rank for rank in unseen if not self._launched.has_ended(rank)]
        if not failure.is_gone:
            return alive
        assert self._store is not None
        if self._store.check(["roll"]):
            absent = self._ranks_without("present")
            return [rank for rank in alive if rank not in absent]
        # One of them, on another machine, is gone; it is not known which one.
        return alive[1:] if alive == unseen else alive

    def _ranks_without(self, key: str) -> list[int]:
        """Return the other ranks that have not written ``key``/RANK."""
        assert self._store is not None
        return [rank for rank in self._others if not self._store.check([f"{key}/{rank}"])]

    def _counted_polls(self, seconds: float) -> Iterator[None]:
        for _ in polls(seconds):
            yield
            self._num_polls += 1

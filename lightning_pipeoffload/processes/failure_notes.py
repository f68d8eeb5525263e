"""What ranks write into the run's store when it fails, for each other to read."""

from __future__ import annotations

import re

from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

from lightning_pipeoffload.processes.failure_cause import Failure

_FAILURE = "failure"
_SEEN = "seen/"
_RAISED = "raised/"
_ROLL = "roll"
_PRESENT = "present/"
_ADDRESS = re.compile(r"0x[0-9a-f]+")


class FailureNotes:
    """One rank's view of what the ranks write when the run fails.

    Args:
        store: A connection to the run's TCPStore that nothing else uses.
        global_rank: The global rank of this process.
        world_size: The world size of the run.

    Raises:
        DistError: Any method, when the store is gone.
    """

    def __init__(self, store: Store, global_rank: int, world_size: int) -> None:
        self.store = store
        self._global_rank = global_rank
        self._others = [rank for rank in range(world_size) if rank != global_rank]

    def read(self) -> Failure | None:
        """Return why the run has failed, if it has; answer if the roll is called."""
        if self.store.check([_ROLL]):
            self.store.set(f"{_PRESENT}{self._global_rank}", "")
        if not self.store.check([_FAILURE]):
            return None
        return Failure.decode(self.store.get(_FAILURE))

    def announce(self, failure: Failure) -> Failure:
        """Put a failure down, unless there is one already; return the one that is there."""
        return Failure.decode(self.store.compare_set(_FAILURE, "", failure.encode()))

    def say_raised(self, cause: str) -> None:
        """Let the others know what this rank has raised by itself."""
        self.store.set(f"{_RAISED}{self._global_rank}", _comparable(cause))

    def all_raise(self, cause: str, ended: list[int]) -> bool | None:
        """Return whether every rank has raised the same; None: not known yet.

        Args:
            cause: What this rank has raised.
            ended: Global ranks that are gone.
        """
        is_open = False
        for rank in self._others:
            if self.store.check([f"{_RAISED}{rank}"]):
                if self.store.get(f"{_RAISED}{rank}").decode() != _comparable(cause):
                    return False
            elif rank in ended or self.store.check([f"{_SEEN}{rank}"]):
                return False
            else:
                is_open = True
        return None if is_open else True

    def say_seen(self) -> None:
        """Let global rank 0, which hosts the store, end; this rank waits for nothing there."""
        self.store.set(f"{_SEEN}{self._global_rank}", "")

    def unseen(self) -> list[int]:
        """Return the other ranks that have not said so."""
        return [rank for rank in self._others if not self.store.check([f"{_SEEN}{rank}"])]

    def call_roll(self) -> None:
        """Ask every rank for a sign of life."""
        self.store.set(_ROLL, "")

    def absent(self) -> list[int] | None:
        """Return the other ranks that have not answered; None: nobody has called the roll."""
        if not self.store.check([_ROLL]):
            return None
        return [rank for rank in self._others if not self.store.check([f"{_PRESENT}{rank}"])]


def _comparable(cause: str) -> str:
    return _ADDRESS.sub("0x", cause)

"""The store of a run, which every rank can read and write, and barriers that use it."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined] # exported at run time
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.constants import default_pg_timeout

# Below the ephemeral ports: between the choice of a port and its use, the system gives it to no
# other process.
_PORTS = range(15_000, 30_000)


def free_port() -> int:
    """Return a port of this machine that no process uses.

    Lightning takes an ephemeral port, which the system may give to another process, such as gloo of
    another run, before the ranks listen there: the run would end with ``EADDRINUSE``.

    Raises:
        RuntimeError: No free port is found.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))  # on all addresses, as the ranks will listen
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of a hundred ports in {_PORTS} is free; set MASTER_PORT to one")


_connections: WeakKeyDictionary[dist.ProcessGroup, dict[str, TCPStore]] = WeakKeyDictionary()


def connect_store(run: str, use: str, timeout: timedelta | None) -> Store:
    """Return a connection to the store that the process group was made with.

    Each run of this process has other keys, and uses the connections of the one before as long as
    there is the same process group, whose first process hosts the store.

    Args:
        run: A name of this run.
        use: What it is for: of two threads each needs its own, since a request may wait.
        timeout: How long to wait for a key that another rank sets.
    """
    world = dist.group.WORLD
    assert world is not None
    uses = _connections.setdefault(world, {})
    wait = timeout or default_pg_timeout
    if use not in uses:
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        uses[use] = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=wait)
    uses[use].set_timeout(wait)
    return PrefixStore(f"pipeoffload/{run}", uses[use])


def drop_cached_connections() -> None:
    """Let later runs open connections of their own, after one that may still wait on these."""
    _connections.clear()


class StoreBarrier:
    """A barrier that ranks enter in the same order; it returns the ranks that have arrived.

    Args:
        store: A connection to the run's store.
        global_rank: The global rank of this process.
        global_ranks: The global ranks that should arrive.
        patience: How long a rank waits for the others.
    """

    def __init__(
        self, store: Store, global_rank: int, global_ranks: Sequence[int], patience: timedelta
    ) -> None:
        self._store = store
        self._global_rank = global_rank
        self._global_ranks = global_ranks
        self._patience = patience
        self._count = 0

    def collect_purposes(self, purpose: str, patience: timedelta | None = None) -> dict[int, str]:
        """Wait for all ranks; return the purpose of each rank that arrives within ``patience``.

        Args:
            purpose: Why this rank waits.
            patience: How long to wait; None: as long as the barrier's.
        """
        self._count += 1
        keys = {rank: f"meeting/{self._count}/{rank}" for rank in self._global_ranks}
        self._store.set(keys[self._global_rank], purpose)
        try:
            self._store.wait(list(keys.values()), patience or self._patience)
        except dist.DistStoreError:
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        values = {rank: self._store.get(key) for rank, key in keys.items()}
        purposes = {rank: value.decode(errors="replace") for rank, value in values.items()}
        if self._count > 2:  # others may still read the keys of the last wait
            self._store.delete_key(f"meeting/{self._count - 2}/{self._global_rank}")
        return purposes

    @property
    def seconds(self) -> float:
        """How long a rank waits."""
        return self._patience.total_seconds()

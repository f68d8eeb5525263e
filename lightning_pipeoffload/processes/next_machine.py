"""Whether a process on another machine has ended, where nothing that waits for it gets an error.

gloo reports a lost rank to whatever waits for its messages. NCCL's kernels wait for ever, and so
does a host that waits for its device. So the first process of each machine listens, and that of
the machine before connects to it. Nothing is accepted or sent: the system ends the connection
together with the process::

    machine 0: rank 0  -- connection -->  machine 1: rank 8  -- connection -->  machine 2: rank 16

Global rank 0 hosts the run's store, whose connections end with it.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress

from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
# A network may forget connections that are silent for longer.
_PROBE_SECONDS = 60


class NextMachineConnection:
    """The connection to the next machine's first process; none where it cannot be reached.

    Args:
        store: The run's store.
        global_rank: The global rank of this process.
        next_rank: That of the process that is watched; None: none.
    """

    def __init__(self, store: Store, global_rank: int, next_rank: int | None) -> None:
        self._next = next_rank
        self._connection: socket.socket | None = None
        self._listening: socket.socket | None = None
        if global_rank > 0:
            with suppress(OSError, KeyError):  # then nobody watches this process
                self._listening, address = _listen()
                store.set(f"address/{global_rank}", address)

    def find_ended(self, store: Store) -> int | None:
        """Return the next machine's rank if its process has ended; the first calls connect."""
        if self._next is None:
            return None
        if self._connection is None:
            self._connect(store, f"address/{self._next}")
            return None
        try:
            self._connection.recv(1)
        except BlockingIOError:
            return None
        except OSError:
            pass
        return self._next

    def _connect(self, store: Store, key: str) -> None:
        if not store.check([key]):
            return
        host, port = store.get(key).decode().split()
        try:
            connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
        except OSError:
            log.debug("global rank %s at %s %s is not watched", self._next, host, port)
            self._next = None
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _PROBE_SECONDS)
        connection.setblocking(False)
        self._connection = connection

    def close(self) -> None:
        """End both connections, when no process is watched any more."""
        self._next = None
        for each in (self._connection, self._listening):
            if each is not None:
                each.close()


def _listen() -> tuple[socket.socket, str]:
    """Listen where the way to global rank 0 leads out of this machine; return the address too."""
    place = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    family, kind, _, _, target = socket.getaddrinfo(*place, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        host = probe.getsockname()[0]
    listening = socket.create_server((host, 0), family=family)
    return listening, f"{host} {listening.getsockname()[1]}"

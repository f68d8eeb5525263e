"""A port for a process group that starts later."""

from __future__ import annotations

import random
import socket

# Below those that a system hands out by itself: between the choice and its use, nobody gets one of
# these without asking for it.
_PORTS = range(15_000, 30_000)


def free_port() -> int:
    """Return a port of this machine that nobody uses.

    Lightning takes one that the system hands out; a process beside this one, another run's gloo
    say, may be given the same before the ranks listen there, and the run ends with ``EADDRINUSE``.

    Raises:
        RuntimeError: No free port is found.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of a hundred ports in {_PORTS} is free; set MASTER_PORT to one")

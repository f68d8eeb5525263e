"""A port for a process group that starts later."""

from __future__ import annotations

import random
import socket

# Below those that a system hands out by itself, which another process may get in the meantime.
_PORTS = range(15_000, 30_000)


def free_port() -> int:
    """Return a port of this machine that nobody uses, and that nobody gets without asking."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of a hundred ports in {_PORTS} is free")

"""Two processes that run the same function, as the two nodes of a run: for ``gpu_check.py``."""

from __future__ import annotations

import os
import socket
import subprocess

import torch

from examples.benchmarks.gpu_part import Function, command_of


def run_two(function: Function, device: torch.device) -> list[str]:
    """Run a part in two processes on a device; return what they say.

    Args:
        function: the part; each process finds in ``NODE_RANK`` which of the two it is.
        device: of both.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [start(rank, port, function, device) for rank in range(2)]
    return [process.communicate()[0] for process in processes]


def start(rank: int, port: int, function: Function, device: torch.device) -> subprocess.Popen[str]:
    """Start one of the two."""
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(rank)}
    return subprocess.Popen(
        command_of(function, device.type),
        env={**os.environ, **places},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

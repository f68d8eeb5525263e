"""Two processes that run the same function, as the two nodes of a run: for ``gpu_check.py``."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from examples.benchmarks.gpu_part import (
    ROW,
    Function,
    Running,
    end,
    is_accelerated,
    lines_of,
    start,
)
from lightning_pipeoffload.processes.run_store import free_port


def run_two(
    function: Function,
    device: torch.device,
    seconds: float = 40,
    environment: Mapping[str, str] | None = None,
) -> list[list[str]]:
    """Run a part in two processes on a device; return the lines of each.

    The process that calls this may not have used the device yet. Its standard error gets them too.

    Args:
        function: The part; each process finds in ``NODE_RANK`` which of the two it is.
        device: The device of both.
        seconds: The seconds after which they are killed on an accelerator.
        environment: Variables beside this process's own.
    """
    places = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo",
        **(environment or {}),
    }  # fmt: skip
    both = [start(function, device, {**places, "NODE_RANK": str(rank)}) for rank in range(2)]
    deadline = time.monotonic() + (seconds if is_accelerated(device) else 600)
    with ThreadPoolExecutor(2) as threads:
        return [*threads.map(partial(_follow, deadline=deadline), range(2), both)]


def _follow(rank: int, running: Running, deadline: float) -> list[str]:
    said = []
    for line in lines_of(running, deadline):
        said.append(line)
        sys.stderr.write(f"{rank}: {line}\n")
    status = end(running, deadline)
    if status:
        sys.stderr.write(f"{rank}: ended with status {status}\n")
    return said


def rows_of(said: list[str]) -> list[str]:
    """Return the rows among the lines of a process."""
    return [line.removeprefix(ROW) for line in said if line.startswith(ROW)]

"""Processes that are ranks, kept over the tests: starting them costs more than most tests do."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing import get_context, set_start_method
from typing import Any


class RankPool:
    """``size`` processes of one process group; a call runs on all of them."""

    def __init__(self, size: int) -> None:
        context = get_context("spawn")
        port = _free_port()
        self.is_broken = False
        self._pipes = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            # No daemon: those must not have workers that load data.
            process = context.Process(target=_serve, args=(theirs, rank, size, port), daemon=False)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 280) -> list[Any]:
        """Call ``function`` in every process; return the results by global rank.

        After a failure the processes may be anywhere, so the pool is of no more use.
        """
        self.is_broken = True
        for pipe in self._pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout):
                raise TimeoutError(f"global rank {rank} does not answer")
            results.append(pipe.recv())
        for rank, (error, _) in enumerate(results):
            if error is not None:
                raise AssertionError(f"global rank {rank} failed:\n{error}")
        self.is_broken = False
        return [value for _, value in results]

    def close(self) -> None:
        for process in self._processes:
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(pipe: Any, rank: int, size: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(size),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    set_start_method(None, force=True)  # workers that load data: as the platform's users have them
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:  # whoever had the pool has gone
            return
        try:
            pipe.send((None, function(*args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))

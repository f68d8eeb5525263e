"""Processes that are ranks, kept over the tests: starting them costs more than most tests do."""

import gc
import os
import traceback
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from lightning_pipeoffload.processes import failure_board, free_port
from lightning_pipeoffload.runtime.comm import ProcessGroups
from tests.support.caches import new_caches
from tests.support.forks import FORKS, fork

# A machine that runs tests may stand still for minutes; who never answers is a defect all the same.
_PATIENCE_SECONDS = 1000.0


class RankPool:
    """``size`` processes; a call runs on all of them, in a process group of its own.

    A call of which no further process answers within ``patience`` seconds raises a TimeoutError.
    """

    def __init__(self, size, patience=_PATIENCE_SECONDS):
        self.is_broken = False
        self._patience = patience
        self._pipes = []
        self._processes = []
        for rank in range(size):
            ours, theirs = FORKS.Pipe()
            self._pipes.append(ours)
            self._processes.append(fork(_serve, theirs, rank, size))

    def run(self, function, *args):
        """Call ``function`` in every process; return the results by global rank.

        After a failure the processes may be anywhere, so the pool is of no more use.
        """
        self.is_broken = True
        port = free_port()
        for pipe in self._pipes:
            pipe.send((port, function, args))
        running = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        results = {}
        while running:
            for pipe in _wait_for_any(running, self._patience):
                rank = running.pop(pipe)
                results[rank] = _receive(pipe, rank)
        self.is_broken = False
        for pipe in self._pipes:  # now that no rank needs another
            pipe.send(None)
        return [results[rank] for rank in sorted(results)]

    @property
    def is_of_use(self):
        """Whether all processes wait for a call; where a machine stood still one may have ended."""
        return not self.is_broken and all(process.is_alive() for process in self._processes)

    def close(self):
        for process in self._processes:
            process.kill()


def _wait_for_any(running, patience):
    ready = wait(list(running), patience)
    if not ready:
        raise TimeoutError(f"global ranks {sorted(running.values())} do not answer")
    return ready


def _receive(pipe, rank):
    try:
        error, result = pipe.recv()
    except EOFError:
        error = "its process has ended"
    if error is not None:
        raise AssertionError(f"global rank {rank} failed:\n{error}")
    return result


def _serve(pipe, rank, size):
    # Where all ranks raise alike one may be late by as much as the machine stands still, and the
    # pool needs it afterwards.
    failure_board._OWN_ERROR_SECONDS = failure_board._SEEN_SECONDS = 300.0
    gc.freeze()
    while True:
        try:
            call = pipe.recv()
        except EOFError:  # whoever had the pool has gone
            return
        if call is None:
            end_groups()
            torch.use_deterministic_algorithms(False)  # a Trainer has set it for good
            continue
        port, function, args = call
        os.environ.update(  # each time: the end of a Trainer removes some
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0",
            WORLD_SIZE=str(size), XDG_CACHE_HOME=new_caches(),
        )  # fmt: skip
        try:
            pipe.send((None, function(*args)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


def end_groups():
    """Let go of the process groups of the call before.

    Each thread of gloo's wakes up a hundred times a second. Those of pools at rest, some hundreds,
    were what the end of a run of all tests spent its time with.
    """
    ProcessGroups.retire_current()
    ProcessGroups._ended.clear()
    ProcessGroups._pending.clear()
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()

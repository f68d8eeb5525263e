"""Fits over two ranks that end before their time, in processes of their own."""

import os
import resource
import signal
import sys
from itertools import count
from pathlib import Path

import lightning as L

from lightning_pipeoffload.processes import failure_board, free_port
from tests.support import fits
from tests.support.forks import fork

# A machine that runs tests may stand still for minutes.
_PATIENCE_SECONDS = 500.0


class SaveAndDie(L.Callback):
    """Saves after the first two batches; is killed at the call of that number in the second save.

    Args:
        path: of the checkpoint.
        last: the call; None: never, and the first save and the number of calls are kept.
    """

    def __init__(self, path, last):
        self.path = path
        self.last = last

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 0:
            trainer.save_checkpoint(self.path)
        else:
            self.save_and_die(trainer)

    def save_and_die(self, trainer):
        calls = count()

        def watch(*_):
            if next(calls) == self.last:
                os.kill(os.getpid(), signal.SIGKILL)

        if self.last is None:
            Path(self.path).rename(f"{self.path}.first") if trainer.is_global_zero else None
        sys.setprofile(watch)
        trainer.save_checkpoint(self.path)
        sys.setprofile(None)
        if self.last is None:
            Path(f"{self.path}.calls{trainer.global_rank}").write_text(str(next(calls)))


class Impatient(L.Callback):
    """Lets a rank that has lost another one end at once: there is nobody to say why."""

    def on_train_start(self, trainer, module):
        failure_board._CAUSE_SECONDS = failure_board._SEEN_SECONDS = 0.3


class FillDisk(L.Callback):
    """Lets a rank write no file longer than that from the second batch on.

    Args:
        rank: which.
        size: of the longest file.
        fails_all: whether every rank fails then: each waits for its own error, however late.
    """

    def __init__(self, rank, size, fails_all):
        self.rank = rank
        self.size = size
        self.fails_all = fails_all

    def on_train_start(self, trainer, module):
        if self.fails_all:
            failure_board._OWN_ERROR_SECONDS = failure_board._SEEN_SECONDS = _PATIENCE_SECONDS

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank == self.rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))


def run_rank(rank, port, folder, callbacks, log):
    """Be one rank of the fit."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE="2",
    )
    for standard in (1, 2):
        os.dup2(os.open(f"{log}{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), standard)
    L.seed_everything(7, verbose=False)
    trainer = fits.trainer(
        2, {"save_distributed_checkpoint": folder}, max_steps=2, callbacks=callbacks
    )
    trainer.fit(fits.Net(), fits.loader())


def run(log, folder, callbacks):
    """Run both ranks to their end; return how they ended and what they wrote.

    Args:
        log: where they write to, less the rank.
        folder: whether checkpoints are folders.
        callbacks: of each rank.
    """
    port = free_port()
    ended = run_both(run_rank, [(rank, port, folder, callbacks[rank], log) for rank in range(2)])
    return ended, [Path(f"{log}{rank}").read_text() for rank in range(2)]


def run_both(target, arguments):
    """Run a function in two processes, each with its arguments; return how they ended."""
    processes = [fork(target, *mine) for mine in arguments]
    for process in processes:
        process.join(_PATIENCE_SECONDS)
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    if hanging:
        raise TimeoutError(f"global ranks {hanging} do not end")
    return [process.exitcode for process in processes]

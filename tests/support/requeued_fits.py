"""Fits over two ranks that Slurm seems to have started, and that it signals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L

from lightning_pipeoffload.processes.run_store import free_port
from tests.support import fits
from tests.support.ending_fits import run_both

NUM_STEPS = 10
_PATIENCE_SECONDS = 500


class Signal(L.Callback):
    """Sends this process the signal when so many optimizer steps are done.

    Args:
        step: after which.
        in_validation: when the validation starts, else the next batch.
        is_first: whether to go on when all ranks have heard of it only.
    """

    def __init__(self, step: int, in_validation: bool, is_first: bool) -> None:
        self._step, self._in_validation, self._is_first = step, in_validation, is_first

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if not self._in_validation:
            self._send(trainer)

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self._in_validation:
            self._send(trainer)

    def _send(self, trainer: L.Trainer) -> None:
        if trainer.global_step == self._step:
            os.kill(os.getpid(), signal.SIGUSR1)
            if self._is_first:
                assert trainer.strategy.fit_run.requeue._is_agreed.wait(_PATIENCE_SECONDS)


def fit_rank(
    rank: int, port: int, root: str, callbacks: list[L.Callback], options: dict[str, Any]
) -> None:
    """Be one rank of a fit over two epochs; global rank 0 adds its losses to a file."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        PATH=f"{root}/bin:{os.environ['PATH']}",
        SLURM_JOB_ID="7",
        SLURM_JOB_NAME="train",
        SLURM_LOCALID=str(rank),
        SLURM_NODEID="0",
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_PROCID=str(rank),
    )
    L.seed_everything(7, workers=True, verbose=False)
    record = fits.Record()
    accumulate = options.pop("accumulate_grad_batches", 1)
    trainer = L.Trainer(
        **fits.SILENT,
        accumulate_grad_batches=accumulate,
        callbacks=[record, *callbacks],
        default_root_dir=f"{root}/root",
        devices=2,
        enable_checkpointing=False,
        max_epochs=2,
        strategy=fits.strategy(2, **options),
    )
    loader = fits.loader("shuffled", batch_size=8 // accumulate)
    trainer.fit(fits.Net(), loader, fits.loader())
    if trainer.is_global_zero:
        with Path(root, "losses").open("a") as file:
            file.write(json.dumps(record.losses) + "\n")


def fit(root: Path, callbacks: tuple[list[L.Callback], list[L.Callback]], options: Any) -> None:
    """Run both ranks to their end, which has to be a good one."""
    port = free_port()
    arguments = [(rank, port, str(root), callbacks[rank], options) for rank in range(2)]
    assert run_both(fit_rank, arguments) == [0, 0]


def make_scontrol(root: Path) -> None:
    """Make a command that notes its arguments."""
    command = root / "bin" / "scontrol"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\necho "$@" >> "{root}/requeued"\n')
    command.chmod(0o755)

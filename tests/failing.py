"""A run that fails as it is told to; started as a user's script is, by Lightning's own launcher.

python tests/failing.py CAUSE RANK
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import lightning as L

from tests import fits


class Failing(fits.Net):
    def __init__(self, cause: str, rank: int) -> None:
        super().__init__()
        self.cause = cause
        self.rank = rank

    def on_train_start(self):
        if self.cause != "refusal":
            return
        if self.trainer.global_rank == self.rank:
            raise ValueError("not like this")
        threading.Event().wait()

    def training_step(self, batch, batch_idx):
        fails = self.cause == "step" and batch_idx == 2 and self.trainer.global_rank == self.rank
        if fails and self.trainer.strategy.place:
            raise KeyError("no such thing")
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx != 2 or self.trainer.global_rank != self.rank:
            return
        if self.cause == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.cause == "ctrl_c":
            os.killpg(os.getpgrp(), signal.SIGINT)
        if self.cause == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.cause == "hook":
            raise RuntimeError("in a hook")


class OtherBatches(L.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if module.cause == "batch" and trainer.global_rank == module.rank:
            batch["x"] += 1


def main() -> None:
    # As in a terminal: what a shell starts in the background ignores Ctrl-C from the start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cause, rank = sys.argv[1], int(sys.argv[2])
    trainer = L.Trainer(
        **fits.SILENT,
        devices=2,
        strategy=fits.strategy(2),
        max_epochs=3,
        enable_checkpointing=False,
        callbacks=[OtherBatches()],
    )
    trainer.fit(Failing(cause, rank), fits.loader(), fits.loader())


if __name__ == "__main__":
    main()

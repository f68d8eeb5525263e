"""Fits that ``trainer.should_stop`` ends; the tests' rank processes run them."""

from __future__ import annotations

from typing import Any

import lightning as L

from tests.support import fits


class Stopping(fits.Net):
    """Sets ``should_stop`` in the batch of index 2, or at an end.

    Args:
        where: a hook, or "step": behind the blocks.
        ranks: that do; None: all.
    """

    def __init__(self, where: str, ranks: list[int] | None) -> None:
        super().__init__(dropout=0.0)
        self.where, self.ranks = where, ranks

    def stop(self, where: str) -> None:
        is_here = self.ranks is None or self.trainer.global_rank in self.ranks
        if where == self.where and is_here and not self.trainer.sanity_checking:
            self.trainer.should_stop = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and loss.item() > 0:
            self.stop("step")
        return loss

    def on_fit_start(self) -> None:
        self.stop("on_fit_start")

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.stop("on_train_epoch_start")

    def on_validation_end(self) -> None:
        self.stop("on_validation_end")

    def on_train_epoch_end(self) -> None:
        self.stop("on_train_epoch_end")


class StopAtBatch(L.Callback):
    """The same in hooks around a batch, which only some fits are to have."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 2:
            module.stop("on_train_batch_start")

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 2:
            module.stop("on_train_batch_end")


def stop(
    num_devices: int, where: str, ranks: list[int] | None, schedule: str = "zb_h1", **options: Any
) -> tuple[int, int, float]:
    """Return after how many steps and batches a fit of three epochs has stopped, and its loss."""
    L.seed_everything(7, verbose=False)
    trainer = L.Trainer(
        **fits.SILENT,
        devices=num_devices or 1,
        strategy=fits.strategy(num_devices, schedule=schedule),
        max_epochs=3,
        enable_checkpointing=False,
        callbacks=[StopAtBatch()] if "batch" in where else [],
        **options,
    )
    trainer.fit(Stopping(where, ranks), fits.loader(), fits.loader())
    batches = trainer.fit_loop.epoch_loop.batch_progress.total.completed
    return trainer.global_step, batches, float(trainer.callback_metrics.get("train_loss_step", 0))

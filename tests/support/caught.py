"""Fits whose exceptions the caller catches, as a sweep does; the tests' rank processes run them."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.support import fits

# where a trial fails, on every rank
FAILURES = ("configure_optimizers", "on_train_start", "probe", "step", "on_train_epoch_end")


class Failing(fits.Net):
    """Raises on every rank, once it is told where."""

    failure = ""

    def visit(self, place: str) -> None:
        if place == self.failure:
            raise ValueError(f"no such thing in {place} of {object()}")

    def configure_optimizers(self) -> Any:
        self.visit("configure_optimizers")
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.visit("on_train_start")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 0:
            self.visit("probe")
        if batch_idx == 2:
            self.visit("step")
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.visit("on_train_epoch_end")


class Saving(L.Callback):
    """A callback of the user's that saves on an exception."""

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint("on_exception.ckpt")


def make_trainer(num_devices: int, folder: str) -> L.Trainer:
    saving = ModelCheckpoint(folder, save_on_exception=True)
    return L.Trainer(
        **fits.SILENT,
        devices=num_devices or 1,
        strategy=fits.strategy(num_devices),
        max_epochs=1,
        callbacks=[OnExceptionCheckpoint(folder), saving, Saving()] if num_devices > 1 else [],
        enable_checkpointing=num_devices > 1,
    )


def sweep(num_devices: int, failures: tuple[str, ...], keep: str, folder: str) -> dict[str, Any]:
    """Fit once for each failure, and then once without; return what came of it.

    Args:
        num_devices: 0: one, without the strategy.
        failures: where each trial but the last fails.
        keep: "trainer": the same one, with the same module; "module"; or "nothing".
        folder: where several ranks' callbacks try to save on each exception.
    """
    caught, trainer, module = [], None, None
    for failure in (*failures, ""):
        if module is None or keep == "nothing":
            L.seed_everything(7, verbose=False)
            module = Failing(dropout=0.0)
        if trainer is None or keep != "trainer":
            trainer = make_trainer(num_devices, folder)
        module.failure = failure
        try:
            trainer.fit(module, fits.loader(), fits.loader())
        except ValueError as error:
            metrics = trainer.callback_metrics  # nobody waits for what will not come
            caught.append((str(error).partition(" of ")[0], "epoch" in str(metrics)))
    return {
        "caught": [text for text, _ in caught],
        "loss": float(trainer.callback_metrics["val_loss"]),
        "steps": trainer.global_step,
    }

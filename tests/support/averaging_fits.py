"""Fits with callbacks that average weights; the rank processes of the tests run them."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tests.support import fits


class OwnTeacher(L.Callback):
    """A copy that follows the module, and takes its place in validation."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        self.teacher: Any = None
        self.loaded: Any = None

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        if self.hook == "setup":
            self.teacher = copy.deepcopy(module).requires_grad_(False)

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self.hook == "on_fit_start":
            self.teacher = copy.deepcopy(module).requires_grad_(False)
        if self.loaded is not None:
            self.teacher.load_state_dict(self.loaded)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        with torch.no_grad():
            for mean, now in zip(self.teacher.parameters(), module.parameters(), strict=True):
                mean.lerp_(now, 0.1)

    def exchange(self, module: L.LightningModule) -> None:
        for mean, now in zip(self.teacher.parameters(), module.parameters(), strict=True):
            before = mean.data.clone()
            mean.data.copy_(now.data)
            now.data.copy_(before)

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.exchange(module)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.exchange(module)

    def state_dict(self) -> dict[str, Any]:
        return {"teacher": self.teacher.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["teacher"]


AVERAGES = {
    "mean": lambda: WeightAveraging(),
    "ema": lambda: EMAWeightAveraging(decay=0.9),
    "foreach": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "swa": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2),
    "teacher": lambda: OwnTeacher("setup"),
    "teacher on_fit_start": lambda: OwnTeacher("on_fit_start"),
}


class ValidationLosses(L.Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.values.append(float(trainer.callback_metrics["val_loss"]))


def average(
    size: int, name: str, folder: str, epochs: int, resume: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Fit with one of ``AVERAGES``; return what it came to, with this rank's weights."""
    L.seed_everything(7, workers=True, verbose=False)
    losses = ValidationLosses()
    saving = ModelCheckpoint(folder, "last", enable_version_counter=False)
    module = fits.Net(dropout=0.0, tie=True)
    trainer = L.Trainer(
        **fits.SILENT,
        devices=size or 1,
        strategy=fits.strategy(size, **options),
        callbacks=[AVERAGES[name](), losses, saving],
        max_epochs=epochs,
    )
    trainer.fit(module, fits.loader(), fits.loader(), ckpt_path=resume)
    weights = {
        name: (trainer.strategy.gather(value) if size > 1 else value).tolist()
        for name, value in module.named_parameters()
    }
    return {"losses": losses.values, "weights": weights}

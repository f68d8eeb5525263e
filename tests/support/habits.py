"""What Lightning's users do without thinking: a row each, run by rank processes and by one device.

A row's outcome is all that is to be equal: what was logged when, the order of the hooks (every
profiled one, overridden or not), learning rates, names of checkpoints, and where the loop stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities import rank_zero_only

from tests.support import fits


class HookOrder(Profiler):
    """Keeps the names of the module's and the callbacks' hooks in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def start(self, action_name: str) -> None:
        if action_name.startswith(("[Callback]", "[LightningModule]")):
            self.names.append(action_name)

    def stop(self, action_name: str) -> None:
        pass


class Journal(Logger):
    """Keeps what global rank 0 logs."""

    name, version = "journal", 0

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[int | None, dict[str, float]]] = []

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.entries.append((step, {name: float(value) for name, value in metrics.items()}))

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Net(fits.Net):
    """With an optimizer of the row's, and as many kinds of steps as Lightning knows."""

    def __init__(self, optimize: Callable[[fits.Net], Any] | None) -> None:
        super().__init__(dropout=0.0, depth=4)
        self.optimize = optimize

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self.optimize(self) if self.optimize else super().configure_optimizers()


def lbfgs(module: L.LightningModule) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3, history_size=2)


def plateau(interval: str, monitor: str) -> Callable[[L.LightningModule], Any]:
    def optimize(module: L.LightningModule) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=3.0)  # so high that the loss goes up
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        how = {"scheduler": scheduler, "interval": interval, "monitor": monitor}
        return {"optimizer": optimizer, "lr_scheduler": how}

    return optimize


@dataclass(frozen=True)
class Row:
    """What a user asks for; ``runs`` are methods of the Trainer, in order."""

    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[L.Callback]] = list
    optimize: Callable[[fits.Net], Any] | None = None
    num_val_loaders: int = 1
    monitor: str = "val_loss"
    runs: tuple[str, ...] = ("fit",)
    num_devices: int = 2


ROWS = {
    "accumulate_grad_batches": Row(
        {"accumulate_grad_batches": 2, "max_time": timedelta(days=1)},
        lambda: [
            LearningRateMonitor("step"),
            ModelCheckpoint(
                filename="{step}-{train_loss_step:.6f}", every_n_train_steps=2, save_top_k=-1
            ),
        ],
    ),
    "accumulation scheduler": Row(
        {"max_epochs": 3},
        lambda: [
            LearningRateMonitor("epoch", log_weight_decay=True),
            GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}),
        ],
    ),
    "accumulation across a validation": Row(
        {"accumulate_grad_batches": 3, "val_check_interval": 2},
    ),
    "accumulation that stops in between": Row(
        {"max_epochs": 9, "accumulate_grad_batches": 4, "val_check_interval": 2},
        lambda: [EarlyStopping("val_loss", min_delta=9.0, patience=1)],
    ),
    "limits in batches": Row(
        {"limit_train_batches": 3, "limit_val_batches": 2, "num_sanity_val_steps": 2}
    ),
    "limits as shares": Row(
        {"limit_train_batches": 0.6, "limit_val_batches": 0.4, "num_sanity_val_steps": 0}
    ),
    "no validation": Row({"limit_val_batches": 0}),
    "val_check_interval in batches": Row(
        {"val_check_interval": 2}, lambda: [LearningRateMonitor()]
    ),
    "val_check_interval as a share": Row({"val_check_interval": 0.4, "max_epochs": 1}),
    "val_check_interval over epochs": Row(
        {"val_check_interval": 3, "check_val_every_n_epoch": None}
    ),
    "val_check_interval as a time": Row({"val_check_interval": timedelta(0), "max_epochs": 1}),
    "check_val_every_n_epoch": Row({"check_val_every_n_epoch": 2}),
    "max_steps": Row({"max_epochs": -1, "max_steps": 7, "gradient_clip_algorithm": "value"}),
    "max_time": Row({"max_time": timedelta(0)}),
    "early stopping on validation": Row(
        {"max_epochs": 9}, lambda: [EarlyStopping("val_loss", min_delta=9.0, patience=1)]
    ),
    "early stopping on training": Row(
        {"max_epochs": 9},
        lambda: [
            EarlyStopping("train_loss", min_delta=9.0, patience=1, check_on_train_epoch_end=True)
        ],
    ),
    "plateau by step": Row({}, lambda: [LearningRateMonitor()], plateau("step", "train_loss_step")),
    "plateau by epoch": Row({}, lambda: [LearningRateMonitor()], plateau("epoch", "val_loss")),
    "LBFGS": Row(
        {"max_epochs": 1, "accumulate_grad_batches": 2, "gradient_clip_val": None},
        optimize=lbfgs,
        num_devices=1,  # over more it is refused
    ),
    "several validation loaders": Row(num_val_loaders=2, monitor="val_loss/dataloader_idx_1"),
    "evaluation before and after": Row(
        {"max_epochs": 1},
        runs=("validate", "test", "predict", "fit", "validate", "test", "predict"),
    ),
    "two fits": Row({"max_epochs": 1}, runs=("fit", "fit")),
    "fast_dev_run": Row({"fast_dev_run": 2}),
    "barebones": Row({"barebones": True}),
}


def run(name: str, num_devices: int, schedule: str, folder: str) -> dict[str, Any]:
    """Run a row; 0 devices: on one, without the strategy."""
    row = ROWS[name]
    L.seed_everything(7, verbose=False)
    order, journal = HookOrder(), Journal()
    callbacks = row.callbacks()
    options: dict[str, Any] = fits.SILENT | {
        "max_epochs": 2,
        "gradient_clip_val": 0.5,
        "log_every_n_steps": 1,
        "logger": journal,
        "profiler": order,
        "callbacks": [
            *callbacks,
            ModelCheckpoint(
                folder, f"{{epoch}}-{{step}}-{{{row.monitor}:.6f}}", row.monitor, save_top_k=2
            ),
        ],
    }
    if "barebones" in row.trainer:
        options = {"accelerator": "cpu", "max_epochs": 2}
    trainer = L.Trainer(
        **options | row.trainer,
        default_root_dir=folder,
        devices=num_devices or 1,
        strategy=fits.strategy(num_devices, schedule=schedule),
    )
    module = Net(row.optimize)
    results = [_run_once(trainer, module, method, row) for method in row.runs]
    numbers = {
        "results": results,
        "logged": journal.entries,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "rates": [callback.lrs for callback in callbacks if hasattr(callback, "lrs")],
    }
    if not trainer.is_global_zero:  # loggers and outputs are there
        del numbers["results"], numbers["logged"]
    return {
        "numbers": numbers,
        "hooks": order.names,
        "files": sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.ckpt")),
        "progress": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
    }


def _run_once(trainer: L.Trainer, module: Net, method: str, row: Row) -> Any:
    if method == "fit":
        if trainer.current_epoch:  # a second fit goes on
            trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        val_loaders = [fits.loader() for _ in range(row.num_val_loaders)]
        return trainer.fit(module, fits.loader(), val_loaders)
    if method == "predict":
        outputs = trainer.predict(module, fits.loader())
        return None if outputs is None else torch.cat(outputs)
    return getattr(trainer, method)(module, fits.loader(), verbose=False)

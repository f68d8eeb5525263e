"""Lightning's habits, tuner and pruning over a pipeline, against one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
)
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from tests.support import fits
from tests.support.pairs import first, slow, some


class HookOrder(Profiler):
    """Keeps the names of the module's and the callbacks' hooks in the order of their calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def start(self, action_name):
        if action_name.startswith(("[Callback]", "[LightningModule]")):
            self.names.append(action_name)

    def stop(self, action_name):
        pass


class Net(fits.Net):
    """With an optimizer of the row's, and as many kinds of steps as Lightning knows."""

    def __init__(self, optimize):
        super().__init__(dropout=0.0, depth=4)
        self.optimize = optimize

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self):
        return self.optimize(self) if self.optimize else super().configure_optimizers()


def lbfgs(module):
    return torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3, history_size=2)


def plateau(interval, monitor):
    def optimize(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=3.0)  # so high that the loss goes up
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        how = {"scheduler": scheduler, "interval": interval, "monitor": monitor}
        return {"optimizer": optimizer, "lr_scheduler": how}

    return optimize


class Thaw(BaseFinetuning):
    """Trains the last blocks first, then more of them, then all."""

    def freeze_before_training(self, module):
        self.freeze([module.embed, module.blocks[:3]])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.blocks[1:3], optimizer, lr=0.05)
        if epoch == 2:
            self.unfreeze_and_add_param_group([module.embed, module.blocks[:1]], optimizer)


class Freezes(L.Callback):
    """Freezes all of one rank's parameters for an epoch; tells how many parameters train."""

    def on_train_epoch_start(self, trainer, module):
        for part in (module.embed, module.blocks[:3]):
            part.requires_grad_(trainer.current_epoch != 1)
        module.log("trained", float(sum(p.numel() for p in module.parameters() if p.requires_grad)))


def equal_values(module):
    """Decide by values, which equal ones of two tensors have."""
    is_equal = torch.equal(module.norm.weight, torch.ones_like(module.norm.weight))
    return torch.optim.SGD(module.parameters(), lr=0.1 if is_equal else 0.5)


def sgd(module):
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


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
    "accumulation that stops in between": Row(
        {"max_epochs": 9, "accumulate_grad_batches": 4, "val_check_interval": 2},
        lambda: [EarlyStopping("val_loss", min_delta=9.0, patience=1)],
    ),
    "limits in batches": Row(
        {"limit_train_batches": 3, "limit_val_batches": 2, "num_sanity_val_steps": 2}
    ),
    "no validation": Row({"limit_val_batches": 0}, optimize=equal_values),
    "val_check_interval in batches": Row(
        {"val_check_interval": 2}, lambda: [LearningRateMonitor()]
    ),
    "val_check_interval over epochs": Row(
        {"val_check_interval": 3, "check_val_every_n_epoch": None}
    ),
    "max_steps": Row({"max_epochs": -1, "max_steps": 7, "gradient_clip_algorithm": "value"}),
    "early stopping on validation": Row(
        {"max_epochs": 9}, lambda: [EarlyStopping("val_loss", min_delta=9.0, patience=1)]
    ),
    "finetuning": Row({"max_epochs": 3}, lambda: [LearningRateMonitor(), Thaw()], sgd),
    "early stopping on training": Row(
        {"max_epochs": 9},
        lambda: [
            EarlyStopping("train_loss", min_delta=9.0, patience=1, check_on_train_epoch_end=True)
        ],
    ),
    "plateau by step": Row({}, lambda: [LearningRateMonitor()], plateau("step", "train_loss_step")),
    "freezing by hand": Row(
        {"max_epochs": 3, "gradient_clip_algorithm": "value"}, lambda: [Freezes()], sgd
    ),
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


def run(name, num_devices, schedule, folder):
    """Run a row; 0 devices: on one, without the strategy."""
    row = ROWS[name]
    L.seed_everything(7, verbose=False)
    order, journal = HookOrder(), fits.Journal()
    callbacks = row.callbacks()
    options = fits.SILENT | {
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


def _run_once(trainer, module, method, row):
    if method == "fit":
        if trainer.current_epoch:  # a second fit goes on
            trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        val_loaders = [fits.loader() for _ in range(row.num_val_loaders)]
        return trainer.fit(module, fits.loader(), val_loaders)
    if method == "predict":
        outputs = trainer.predict(module, fits.loader())
        return None if outputs is None else torch.cat(outputs)
    return getattr(trainer, method)(module, fits.loader(), verbose=False)


@cache
def on_one_device(row):
    with TemporaryDirectory() as folder:
        return run(row, 0, "", folder)


@pytest.mark.parametrize(("row", "schedule"), some(zip(ROWS, cycle(["1f1b", "zb_h1", "zb_v"])), 4))
def test_a_habit_is_as_on_one_device(ranks, tmp_path, row, schedule):
    expected = on_one_device(row)
    count = ROWS[row].num_devices
    for outcome in ranks(count).run(run, row, count, schedule, str(tmp_path)):
        numbers = {name: expected["numbers"][name] for name in outcome["numbers"]}
        torch.testing.assert_close(outcome["numbers"], numbers, rtol=1e-10, atol=1e-12)
        for what in ("hooks", "files", "progress"):
            assert outcome[what] == expected[what]


class Tuned(fits.Net):
    """Brings its own loader, of a size that a tuner may set."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.batch_size, self.lr = 4, 0.1

    def train_dataloader(self):
        return DataLoader(fits.samples(), self.batch_size, collate_fn=fits.collate)

    val_dataloader = test_dataloader = train_dataloader

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def make_trainer(num_devices, **options):
    trainer = fits.trainer(
        num_devices,
        {"num_microbatches": "auto"},
        num_sanity_val_steps=0,
        **options,
        max_epochs=1,
        enable_checkpointing=True,
    )
    if num_devices:
        fits.outlive_failures(trainer)
    return trainer


def scale(num_devices, folder, method):
    module, trainer = Tuned(), make_trainer(num_devices, default_root_dir=folder)
    try:
        found = Tuner(trainer).scale_batch_size(
            module, method=method, max_trials=3, steps_per_trial=2
        )
    except ValueError as error:
        return str(error)
    getattr(trainer, method)(module)
    return found, module.batch_size


@pytest.mark.parametrize("method", first(1, ["fit", "validate", "test"]))
def test_one_rank_finds_the_batch_size_of_one_device(ranks, tmp_path, method):
    expected = scale(0, tmp_path, method)
    assert ranks(1).run(scale, 1, str(tmp_path), method) == [expected]


@pytest.mark.parametrize("method", some(["fit", "validate"], 2))
def test_several_ranks_refuse_to_search_for_a_batch_size(ranks, tmp_path, method):
    for refusal in ranks(2).run(scale, 2, str(tmp_path), method):
        assert "the batch size finder is not supported over several ranks" in refusal
        assert "use memory_limit, or devices=1" in refusal


def find_rate(num_devices, folder):
    L.seed_everything(7, verbose=False)
    module, trainer = Tuned(), make_trainer(num_devices, default_root_dir=folder)
    finder = Tuner(trainer).lr_find(module, num_training=10, early_stop_threshold=None)
    tried = finder.results["lr"], finder.results["loss"]
    trainer.fit(module)
    return *tried, module.lr, float(trainer.callback_metrics["train_loss"])


@pytest.mark.parametrize("num_ranks", [slow(1), 2])
def test_a_learning_rate_is_found_as_on_one_device(ranks, tmp_path, num_ranks):
    expected = find_rate(0, tmp_path)
    for found in ranks(num_ranks).run(find_rate, num_ranks, str(tmp_path)):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9)


def prune(num_devices):
    trainer = make_trainer(num_devices, callbacks=[ModelPruning("l1_unstructured", amount=0.3)])
    with pytest.raises(ValueError, match="ModelPruning") as refusal:
        trainer.fit(Tuned())
    return str(refusal.value)


@pytest.mark.parametrize("num_ranks", [2, slow(1)])
def test_pruning_while_training_is_refused(ranks, num_ranks):
    for refusal in ranks(num_ranks).run(prune, num_ranks):
        assert "prune the checkpoint after training instead" in refusal

"""Fits with checkpoints of many kinds at once; the rank processes of the tests run them."""

import os
import runpy
import sys
import weakref
from datetime import timedelta
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipeoffload.checkpoints import CheckpointGatherer
from lightning_pipeoffload.runtime import StoredTensor
from tests.support import fits

# folder: options of the ModelCheckpoint that writes to it
KINDS = {
    "top": {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{val_loss:.4f}"},
    "last": {"monitor": "val_accuracy", "save_last": True, "save_top_k": 1},
    "link": {"monitor": "val_loss", "mode": "max", "save_last": "link", "save_top_k": -1},
    "steps": {"every_n_train_steps": 3, "save_top_k": -1},
    "metric": {
        "monitor": "train_loss_step",
        "every_n_train_steps": 2,
        "filename": "{step}-{train_loss_step:.4f}",
    },
    "weights": {"monitor": "train_loss_epoch", "save_weights_only": True},
    "time": {"train_time_interval": timedelta(0), "filename": "always"},
}


class Changing(fits.Net):
    """Changes what is saved, as modules do that leave out what they need not."""

    strict_loading = False

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        state.pop("blocks.7.linear.bias", None)
        return {**state, "version": torch.tensor(3)}

    def on_save_checkpoint(self, checkpoint):
        del checkpoint["state_dict"]["norm.weight"]
        checkpoint["numbers"] = sum(
            v.half().cpu().numel() for v in checkpoint["state_dict"].values()
        )

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint["numbers"]


class Saves(L.Callback):
    """Saves by itself, and has a state."""

    def __init__(self, folder):
        self.folder = folder
        self.steps = 0

    def on_train_start(self, trainer, module):
        trainer.save_checkpoint(f"{self.folder}/before.ckpt")

    def on_train_batch_end(self, trainer, *_):
        self.steps += 1
        if self.steps == 3:
            trainer.save_checkpoint(f"{self.folder}/third.ckpt", weights_only=True)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def fit_from(size, folder, path, options, shuffled=True):
    """Fit for two epochs of five batches, from the start or a checkpoint; save each."""
    L.seed_everything(7, workers=True, verbose=False)
    record = fits.Record()
    checkpoint = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    trainer = fits.trainer(
        size, options, max_epochs=2, callbacks=[record, checkpoint], enable_checkpointing=True
    )
    loader = fits.loader("shuffled" if shuffled else "map")
    module = fits.Net(dropout=0.1 if shuffled else 0.0)
    validation = fits.loader()
    # Lightning leaves out the validation after an epoch's last batch if a fit resumes between them.
    # It has a generator of its own, then, or the next epoch's order would be without its draw.
    validation.generator = torch.Generator()
    trainer.fit(module, loader, validation, ckpt_path=path)
    return {"losses": record.losses, "batches": record.batches, "rates": record.rates}


def trainer_of(size, folder, max_epochs, **options):
    L.seed_everything(7, workers=True, verbose=False)
    checkpoints = [ModelCheckpoint(f"{folder}/{name}", **kind) for name, kind in KINDS.items()]
    return fits.trainer(
        size,
        options,
        max_epochs=max_epochs,
        callbacks=[fits.Record(), Saves(folder), *checkpoints],
        enable_checkpointing=True,
    )


def list_files(folder):
    """List checkpoints, and where links lead; what is in one that is a folder is its own affair."""
    found = []
    for path in sorted(Path(folder).glob("**/*.ckpt")):
        name = str(path.relative_to(folder))
        found.append(f"{name} -> {os.readlink(path)}" if path.is_symlink() else name)
    return found


def describe(trainer, folder):
    """Say what the callbacks believe."""
    return {
        str(Path(callback.dirpath).name): {
            "best": os.path.relpath(callback.best_model_path, folder),
            "last": os.path.relpath(callback.last_model_path or folder, folder),
            "scores": sorted(round(float(v), 6) for v in callback.best_k_models.values()),
        }
        for callback in trainer.checkpoint_callbacks
    }


def fit_and_save(size, folder, options):
    """Fit for two epochs with all kinds of checkpoints; validate the best and the last."""
    trainer = trainer_of(size, folder, 2, **options)
    module = Changing(dropout=0.0)
    trainer.fit(module, fits.loader(), fits.loader())
    described = describe(trainer, folder)
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    files = list_files(folder)
    losses = []
    for path in ("best", "last", f"{folder}/steps/epoch=0-step=3.ckpt", f"{folder}/before.ckpt"):
        given = {"ckpt_path": path, "weights_only": True, "verbose": False}
        trainer.validate(module, fits.loader(), **given)
        losses.append(float(trainer.callback_metrics["val_loss"]))
    return {"described": described, "files": files, "losses": losses, "loaded": module.loaded}


def resume(size, folder, options):
    """Go on for a third epoch from the last checkpoint there is."""
    trainer = trainer_of(size, folder, 3, **options)
    trainer.fit(Changing(dropout=0.0), fits.loader(), fits.loader(), ckpt_path="last")
    record, saves = trainer.callbacks[:2]
    return {"losses": record.losses, "steps": saves.steps, "described": describe(trainer, folder)}


class SavesFirst(L.Callback):
    """Saves before the first step, to where the fit was resumed from."""

    def __init__(self, path):
        self.path = path

    def on_train_start(self, trainer, module):
        trainer.save_checkpoint(self.path)


def count_values(size, path, options):
    """Fit, save, and go on with the checkpoint, which is replaced before the first step.

    Returns:
        The losses, how many tensors of other ranks were in memory at a time, and how many of the
        checkpoint's were read.
    """
    received = weakref.WeakSet()
    counts = [0]
    read = []
    receive, value = CheckpointGatherer._receive, StoredTensor.value

    def receive_counted(*args):
        found = receive(*args)
        received.add(found.untyped_storage())
        counts.append(len(received))
        return found

    def value_counted(stored):
        read.append(id(stored))
        return value(stored)

    losses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointGatherer, "_receive", receive_counted)
        patch.setattr(StoredTensor, "value", value_counted)
        for epochs, callbacks in ((1, []), (2, []), (3, [SavesFirst(path)])):
            record = fits.Record()
            trainer = fits.trainer(size, options, max_epochs=epochs, callbacks=[record, *callbacks])
            L.seed_everything(7, workers=True, verbose=False)
            module = fits.Net(dropout=0.0, tie=True)
            trainer.fit(module, fits.loader(), ckpt_path=path if epochs > 1 else None)
            trainer.save_checkpoint(path)
            losses += record.losses
            if epochs == 2:
                num_read = len(read)
    return {"losses": losses, "received": max(counts), "read": num_read}


def consolidate(folder):
    """Make the one file that Lightning's command makes of a folder."""
    file = f"{folder}.consolidated"
    if not Path(file).exists():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["consolidate_checkpoint", str(folder)])
            runpy.run_module(
                "lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__"
            )
    return file

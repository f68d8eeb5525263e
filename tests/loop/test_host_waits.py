"""From one batch to the next nothing waits for what the device was given meanwhile.

Every tensor counts as one of the device here; what has been copied to the host may be read, a batch
after the copy was started.
"""

import sys
from threading import current_thread, main_thread

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_pipeoffload import PipelineMonitor, PipeOffloadStrategy
from lightning_pipeoffload.loop import fit as fit_module
from lightning_pipeoffload.loop.exchange import Exchange
from lightning_pipeoffload.runtime import late_values
from tests.support.fits import SILENT

READING = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def training_step(self, batch, batch_idx):
        x = batch
        for block in self.blocks:
            x = functional.relu(block(x))
        loss = x.pow(2).mean()
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("mean", x.mean(), batch_size=3)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Reading(Model):
    def on_train_batch_end(self, *args):
        float(self.blocks[0].weight.sum())


class Silent(Model):
    def log(self, *args, **kwargs):
        """Do nothing: Lightning reads values for a logger."""


class SteadyBatches(Callback):
    """Knows which batch it is; from the fourth on no tensor may be read."""

    def __init__(self):
        self.batch = 0
        self.shown = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.batch = batch_idx

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.shown.append(dict(trainer.progress_bar_metrics))

    def on_train_epoch_end(self, trainer, pl_module):
        self.batch = 0
        self.at_end = dict(trainer.progress_bar_metrics)

    def on_exception(self, trainer, pl_module, exception):
        self.batch = 0

    @property
    def is_steady(self):
        return self.batch >= 3

    def check_copy(self, started):
        assert self.batch > started or not self.is_steady


def is_of_data(reader):
    return "torch/utils/data" in reader


@pytest.fixture
def steady(monkeypatch):
    steady = SteadyBatches()

    def forbid(name):
        plain = getattr(Tensor, name)

        def read(self, *args, **kwargs):
            reader = sys._getframe(1).f_code.co_filename
            if steady.is_steady and not hasattr(self, "is_copy") and not is_of_data(reader):
                raise AssertionError(f"{name} waits for the device, called from {reader}")
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(Tensor, name, read)

    def start_host_copy(tensor):
        copy, started = tensor.detach().clone(), steady.batch
        copy.is_copy = True

        def wait():
            if current_thread() is main_thread():  # others are there to wait
                steady.check_copy(started)
            return copy

        return wait

    for name in READING:
        forbid(name)
    monkeypatch.setattr(late_values, "start_host_copy", start_host_copy)
    monkeypatch.setattr(late_values, "is_on_accelerator", lambda value: isinstance(value, Tensor))
    comparing = lambda pipeline, late, compares: Exchange(pipeline, True, compares)  # noqa: E731
    monkeypatch.setattr(fit_module, "Exchange", comparing)
    return steady


def fit(steady, *callbacks, module=Model, logger=False, **options):
    torch.manual_seed(0)
    Trainer(
        devices=1,
        strategy=PipeOffloadStrategy(**{"num_microbatches": 2, "schedule": "zb_h1", **options}),
        callbacks=[steady, *callbacks],
        max_epochs=1,
        enable_checkpointing=False,
        log_every_n_steps=1,
        **{**SILENT, "enable_progress_bar": bool(callbacks), "logger": logger},
    ).fit(module(), DataLoader(torch.randn(32, 4), batch_size=4))


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_with_a_progress_bar_and_logged_means(steady, bar):
    fit(steady, bar())
    values = [shown.get("loss_step") for shown in steady.shown]
    assert values[0] is None
    assert len({*values}) == 8
    assert all(isinstance(value, float) for value in values[1:])
    assert steady.at_end["loss_epoch"] > 0


def test_with_a_monitor(steady, tmp_path):
    logger = CSVLogger(tmp_path, "", "")
    fit(steady, PipelineMonitor(), module=Silent, logger=logger)
    assert "pipeline/grad_norm" in (tmp_path / "metrics.csv").read_text()


def test_with_weights_that_are_on_the_device(steady):
    fit(steady, TQDMProgressBar(), microbatch_weight=lambda part: part.abs().sum())


def test_weights_on_the_device_that_give_no_mean_are_refused_a_batch_later(steady):
    with pytest.raises(ValueError, match="microbatch_weight returned .* must return numbers"):
        fit(steady, microbatch_weight=lambda part: -part.abs().sum())
    assert len(steady.shown) == 1


def test_what_reads_a_tensor_is_noticed(steady):
    with pytest.raises(AssertionError, match="__float__ waits for the device"):
        fit(steady, module=Reading)

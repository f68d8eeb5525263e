"""Families through the Trainer, over processes, against Lightning on one device."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_pipeoffload import PipeOffloadStrategy
from tests.support.families import FAMILIES, Task
from tests.support.fits import SILENT
from tests.support.pairs import first


class Fitted(Task):
    """A task that logs its loss and has an optimizer."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", super().validation_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(name, num_devices):
    family = FAMILIES[name]
    L.seed_everything(7, verbose=False)
    module = Fitted(family.make(), family.loss).double()
    batches = [family.samples(8) for _ in range(3)]
    pipeline = PipeOffloadStrategy(num_microbatches=4, blocks=family.blocks)
    trainer = L.Trainer(
        **SILENT,
        devices=num_devices or 1,
        strategy=pipeline if num_devices else "auto",
        max_epochs=1,
        enable_checkpointing=False,
    )
    data = [DataLoader(batches, batch_size=None) for _ in range(2)]
    trainer.fit(module, *data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("name", first(1, ["gpt2", "vit", "llama_cache", "lightning_demo"]))
def test_a_fit_is_that_of_one_device(ranks, name):
    expected = fit(name, 0)
    for found in ranks(2).run(fit, name, 2):
        assert found == pytest.approx(expected, rel=1e-10)

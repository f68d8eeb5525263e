"""Batches whose loss or gradients are not finite are left out, by the recipes of the docs."""

import pytest
import torch

from tests.support import fits
from tests.support.pairs import first

BAD = 3  # a token that makes its microbatch's loss NaN


class Net(fits.Net):
    def __init__(self):
        super().__init__(dropout=0.0, depth=4)
        self.num_bad = 0

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if not torch.isfinite(loss).all():  # never, and not in the step's trace either
            loss = torch.full_like(loss, 1e9)
        loss = loss * torch.where((batch["x"] == BAD).any(), torch.nan, 1.0)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ByGradients(Net):
    """As in docs/metrics_and_hooks.md."""

    def on_after_backward(self):
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if not all(gradient.isfinite().all() for gradient in gradients):
            self.num_bad += 1
            self.zero_grad()


class ByLoss(Net):
    def on_after_backward(self):
        if not self.trainer.callback_metrics["loss"].isfinite():
            self.num_bad += 1
            self.zero_grad()


class NoStep(Net):
    """As in docs/metrics_and_hooks.md."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer_closure()
        if self.trainer.callback_metrics["loss"].isfinite():
            optimizer.step()
        else:
            self.num_bad += 1


MODULES = {"gradients": ByGradients, "step": NoStep, "loss": ByLoss}


def train(num_devices, row, options):
    torch.manual_seed(3)
    module = MODULES[row]()
    trainer = fits.trainer(num_devices, options, max_epochs=2)
    trainer.fit(module, fits.loader())
    weights = dict(module.named_parameters())
    if num_devices:
        weights = {name: trainer.strategy.gather(value) for name, value in weights.items()}
    return module.num_bad, {name: value.detach().clone() for name, value in weights.items()}


PIPELINES = {"zb_h1": {}, "zb_v": {"schedule": "zb_v"}, "1f1b": {"schedule": "1f1b"}}


@pytest.mark.parametrize("row", first(1, [*MODULES]))
@pytest.mark.parametrize("pipeline", first(1, [*PIPELINES]))
def test_a_bad_batch_is_left_out_as_on_one_device(ranks, row, pipeline):
    num_bad, expected = train(0, row, {})
    assert 0 < num_bad < 10
    for found in ranks(2).run(train, 2, row, PIPELINES[pipeline]):
        assert found[0] == num_bad
        torch.testing.assert_close(found[1], expected)


class Skipping(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss > 1e6:
            return None
        return loss


def train_skipping(num_devices):
    trainer = fits.trainer(num_devices, max_steps=1)
    with pytest.warns(UserWarning, match=r"may return None \(.*: return None\): .* optimizer_step"):
        trainer.fit(Skipping(), fits.loader())


def test_a_step_that_skips_a_batch_is_named_at_the_start(ranks):
    ranks(1).run(train_skipping, 1)

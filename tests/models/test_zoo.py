"""Models of the packages of ``[zoo]`` train unchanged: in stages, and over two processes."""

from importlib.util import find_spec

import lightning as L
import pytest
import torch

from tests.models.zoo import ZOO, row_of
from tests.support import fits
from tests.support.families import Task

pytestmark = pytest.mark.slow

ROWS = [name for name in ZOO if find_spec(name.partition(" ")[0].replace("-", "_"))]
OVER_PROCESSES = ["transformers T5", "transformers LLaVA, frozen tower", "timm resnet18"]


@pytest.mark.parametrize("name", ROWS)
def test_a_model_trains_as_the_plain_one_and_is_balanced(name):
    *_, of_four_ranks, _ = row_of(name).split("|")
    assert float(of_four_ranks) <= 1.5


class Trained(Task):
    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def fit_model(num_devices, name):
    L.seed_everything(7, verbose=False)
    family = ZOO[name]
    module = Trained(family.make(), family.loss).to(family.dtype).eval()  # no dropout
    batches = [family.samples(8) for _ in range(2)]
    trainer = fits.trainer(num_devices, {"num_microbatches": 4}, max_epochs=1)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return float(trainer.callback_metrics["loss"])


@pytest.mark.parametrize("name", [name for name in OVER_PROCESSES if name in ROWS])
def test_over_two_processes_a_fit_is_one_devices(ranks, name):
    expected = fit_model(0, name)
    for found in ranks(2).run(fit_model, 2, name):
        assert found == pytest.approx(expected, rel=1e-9)

"""Models of the packages of ``[zoo]`` train unchanged: in stages, and over processes."""

from functools import cache
from importlib.util import find_spec

import lightning as L
import pytest
import torch
from torch.utils._pytree import tree_map

from tests.models.zoo import ZOO, row_of
from tests.support import fits
from tests.support.families import Task

pytestmark = pytest.mark.slow

DRAWS = ["transformers BERT"]  # its step draws masks, by seeds of its own in each microbatch
ROWS = [name for name in ZOO if find_spec(name.partition(" ")[0].replace("-", "_"))]


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


def in_parts(batch, count):
    return [tree_map(lambda leaf, i=i: leaf.chunk(count)[i], batch) for i in range(count)]


def fit_model(num_devices, name, offload="none"):
    L.seed_everything(7, verbose=False)
    family = ZOO[name]
    module = Trained(family.make(), family.loss).to(family.dtype).eval()  # no dropout
    batches = [family.samples(8) for _ in range(2)]
    accumulate = {}
    if not num_devices:  # one device calls the step for each microbatch
        batches = [part for batch in batches for part in in_parts(batch, 4)]
        accumulate = {"accumulate_grad_batches": 4}
    trainer = fits.trainer(
        num_devices, {"num_microbatches": 4, "offload": offload}, max_epochs=1, **accumulate
    )
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    return float(trainer.callback_metrics["loss"])


fit_on_one_device = cache(lambda name: fit_model(0, name))


@pytest.mark.parametrize(("count", "offload"), [(2, "none"), (3, "full")])
@pytest.mark.parametrize("name", [name for name in ROWS if name not in DRAWS])
def test_over_processes_a_fit_is_one_devices(ranks, name, count, offload):
    expected = fit_on_one_device(name)
    for found in ranks(count).run(fit_model, count, name, offload):
        assert found == pytest.approx(expected, rel=max(1e-9, ZOO[name].tolerance))

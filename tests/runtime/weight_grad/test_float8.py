"""torchao's float8 linear layers train as on one device, and their weight gradients wait for W."""

from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.support import fits
from tests.support.pairs import slow

float8 = pytest.importorskip("torchao.float8")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(L.LightningModule):
    def __init__(self, recipe, **config):
        super().__init__()
        recipe = float8.Float8LinearConfig.from_recipe_name(recipe)
        self.config = replace(recipe, emulate=True, **config)  # without a GPU's products
        self.blocks = None

    def configure_model(self):
        if self.blocks is None:
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            float8.convert_to_float8_training(self.blocks, config=self.config)

    def training_step(self, batch, batch_idx):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(num_devices, options, recipe="tensorwise", **config):
    """Fit on batches of two microbatches; one device accumulates them."""
    module, batch_size = Net(recipe, **config), 8 if num_devices else 4
    accumulated = {} if num_devices else {"accumulate_grad_batches": 2}
    trainer = fits.trainer(
        num_devices, {"num_microbatches": 2, **options}, max_epochs=1, **accumulated
    )
    data = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(data, batch_size))
    values = module.parameters()
    if num_devices:
        values = map(trainer.strategy.gather, values)
    report = trainer.strategy.report()["measured"] if num_devices else {}
    return [value.detach().clone() for value in values], report


@pytest.mark.parametrize(
    ("num_devices", "options", "recipe"),
    [
        (2, {"schedule": "zb_h1"}, "tensorwise"),
        slow((2, {"schedule": "zb_h1"}, "rowwise")),
        slow((2, {"schedule": "zb_h1"}, "rowwise_with_gw_hp")),
        slow((2, {"schedule": "zb_v", "recompute": "full"}, "tensorwise")),
        slow((1, {"schedule": "zb_h1", "offload": "full"}, "tensorwise")),
    ],
)
def test_float8_layers_train_as_on_one_device_and_leave_w_its_work(
    ranks, num_devices, options, recipe
):
    ((expected, _),) = ranks(1).run(fit, 0, {}, recipe)
    for found, measured in ranks(num_devices).run(fit, num_devices, options, recipe):
        assert all(map(torch.equal, found, expected))
        assert measured["deferred_flops"] == measured["weight_flops"]


@pytest.mark.slow
def test_a_compiled_block_adds_them_in_b(ranks):
    ((expected, _),) = ranks(1).run(fit, 0, {})
    options = {"schedule": "zb_h1", "compile": {"backend": "aot_eager"}}
    for found, _ in ranks(2).run(fit, 2, options):
        assert all(map(torch.equal, found, expected))

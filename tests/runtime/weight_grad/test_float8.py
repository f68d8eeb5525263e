"""torchao's float8 linear layers train as on one device, and their weight gradients wait for W."""

from dataclasses import replace

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from examples.tensor_parallel import Llama
from lightning_pipeoffload import tensor_parallel_plan
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
    def __init__(self, recipe, wraps):
        super().__init__()
        recipe = float8.Float8LinearConfig.from_recipe_name(recipe)
        self.config = replace(  # without a GPU's products
            recipe, emulate=True, enable_fsdp_float8_all_gather=wraps
        )
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


def fit(num_devices, options, recipe="tensorwise", wraps=False):
    """Fit on batches of two microbatches; one device accumulates them."""
    module, batch_size = Net(recipe, wraps), 8 if num_devices else 4
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


def test_weights_that_are_wrapped_for_fsdp_are_refused_by_name(ranks):
    refusal = "blocks.0.up.weight is a WeightWith.* leave enable_fsdp_float8_all_gather out"
    with pytest.raises(AssertionError, match=refusal):
        ranks(1).run(fit, 1, {}, "tensorwise", True)


class Shared(Llama):
    """A Llama in float8, whose layers are shared by ranks."""

    def configure_model(self):
        if self.model is None:
            torch.manual_seed(0)
            self.model = LlamaForCausalLM(self.config)
            config = replace(float8.Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
            float8.convert_to_float8_training(self.model.model, config=config)
            if self.device_mesh is not None:
                mesh = self.device_mesh["tensor_parallel"]
                parallelize_module(self.model, mesh, tensor_parallel_plan(self.model))


def fit_shared(size):
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    options = {"tensor_parallel_size": size, "schedule": "zb_h1", "num_microbatches": 2}
    trainer = fits.trainer(size, options, max_steps=4)
    data = torch.randint(64, (32, 32), generator=torch.Generator().manual_seed(1))
    trainer.fit(Shared(config), DataLoader(data, 8))
    return float(trainer.callback_metrics["loss"]), trainer.strategy.report()["measured"]


@pytest.mark.slow
def test_tensor_ranks_leave_w_its_work(ranks):
    ((expected, _),) = ranks(1).run(fit_shared, 1)
    for loss, measured in ranks(2).run(fit_shared, 2):
        assert loss == pytest.approx(expected, rel=1e-3)  # each scales its shard
        assert measured["deferred_flops"] == measured["weight_flops"]

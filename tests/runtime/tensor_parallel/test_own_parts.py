"""A rank makes its shards of its own stages' layers, with the bits of one device, alone."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_pipeoffload.runtime.making import constructing_local_stages, make_blueprint
from lightning_pipeoffload.runtime.shapes import ShapeOnly, sharding_of
from lightning_pipeoffload.runtime.tensor_parallel import (
    fake_process_group,
    fake_tensor_mesh,
    replace_dtensors,
    sharding_without_scatter,
)
from lightning_pipeoffload.runtime.tensor_parallel.shard_initialization import initializing_shards
from lightning_pipeoffload.runtime.users_code import find_slots

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


class Net(nn.Module):
    """Two blocks with trunc_normal_, and a norm that no plan names."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(4)
        self.init_weights()

    def init_weights(self):
        for block in self.blocks:
            nn.init.trunc_normal_(block[0].weight, std=0.5, a=-0.5, b=0.5)
            block[2].weight.data.normal_().mul_(0.1)


class Late(L.LightningModule):
    def __init__(self, on_meta, mesh=None):
        super().__init__()
        self.on_meta, self.mesh = on_meta, mesh

    def configure_model(self):
        with torch.device("meta" if self.on_meta else "cpu"):
            self.net = Net()
        for block in self.net.blocks if self.mesh is not None else ():
            parallelize_module(block, self.mesh, PLAN)
        if self.on_meta:
            self.net.to_empty(device="cpu")
            for part in self.net.modules():
                if hasattr(part, "reset_parameters"):
                    part.reset_parameters()
            self.net.init_weights()


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_rank_has_its_shards_of_what_one_device_draws(on_meta):
    L.seed_everything(5, verbose=False)
    plain = Late(on_meta)
    plain.configure_model()
    after, whole = torch.get_rng_state(), dict(plain.named_parameters())
    found = set()
    with fake_process_group(2):
        for stage in (0, 1):
            L.seed_everything(5, verbose=False)
            module = make_part(Late(on_meta, fake_tensor_mesh(2)["tensor_parallel"]), stage)
            assert torch.equal(torch.get_rng_state(), after)
            for slot in find_slots(module):
                sharding = sharding_of(slot.tensor)
                expected = whole[slot.name]
                part = expected if sharding is None else sharding.local_shard_of(expected)
                assert slot.tensor.shape == part.shape
                assert (sharding is not None) == ("blocks" in slot.name)
                if not isinstance(slot.tensor, ShapeOnly):
                    assert torch.equal(slot.tensor, part), slot.name
                    assert slot.name not in found
                    found.add(slot.name)
    assert found == whole.keys()


def make_part(module, stage):
    def configure():
        with initializing_shards(module), sharding_without_scatter(have_equal_values=True):
            module.configure_model()
        replace_dtensors(module, module.mesh)

    blueprint = make_blueprint(module, configure, (0, 1))
    with constructing_local_stages(module, blueprint, [stage], ["stage 0", "stage 1"]):
        configure()
    return module

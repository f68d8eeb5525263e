"""What is drawn into shards is this rank's part of what one device draws."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_pipeoffload.runtime.shapes import RemoteTensor, sharding_of
from lightning_pipeoffload.runtime.tensor_parallel import gather_whole, replace_dtensors
from lightning_pipeoffload.runtime.tensor_parallel.shard_initialization import initializing_shards
from lightning_pipeoffload.runtime.users_code import find_slots
from tests.runtime.tensor_parallel.test_layers import Inner, mesh_of_two

PLAN = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}


def initialize(net):
    nn.init.normal_(net.up.weight)
    nn.init.trunc_normal_(net.gate.weight, std=0.02)
    net.down.reset_parameters()
    net.down.weight.data.uniform_(-0.1, 0.1)
    nn.init.kaiming_normal_(net.down.weight)
    nn.init.xavier_uniform_(net.up.weight)


def draw(kind):
    """Return the largest difference from one device's, and whether generators are as there."""
    mesh = mesh_of_two()
    torch.manual_seed(0)
    whole = Inner()
    initialize(whole)
    expected = torch.rand(4)
    torch.manual_seed(0)
    net = Inner()
    parallelize_module(net, mesh, PLAN)
    if kind != "DTensors":
        replace_dtensors(net, mesh)
    if kind == "of another stage":
        for slot in find_slots(net):
            slot.put(RemoteTensor.standing_for(slot, slot.name, torch.device("cpu")))
    with initializing_shards(net):
        initialize(net)
    is_alike = torch.equal(torch.rand(4), expected)
    if kind == "DTensors":
        replace_dtensors(net, mesh)
    if kind == "of another stage":
        return 0, is_alike
    off = [
        (gather_whole(parameter, sharding_of(parameter)) - whole.get_parameter(name)).abs().max()
        for name, parameter in net.named_parameters()
        if sharding_of(parameter).is_divided
    ]
    return max(off).item(), is_alike


@pytest.mark.parametrize("kind", ["DTensors", "shards", "of another stage"])
def test_draws_into_shards_are_those_of_one_device(ranks, kind):
    assert ranks(2).run(draw, kind) == [(0, True)] * 2


def refusal():
    mesh, net = mesh_of_two(), Inner()
    parallelize_module(net, mesh, PLAN)
    replace_dtensors(net, mesh)
    with initializing_shards(net):
        with pytest.raises(ValueError, match=r"shape \(4,\) are drawn into a part of .* \(8, 4\)"):
            net.up.weight.data[0].normal_()
        with pytest.raises(ValueError, match="orthogonal_ fills a weight by its rows"):
            nn.init.orthogonal_(net.up.weight)


def test_draws_into_a_part_of_a_weight_are_refused(ranks):
    ranks(2).run(refusal)

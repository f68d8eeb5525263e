"""Steps that start a backward themselves: right within a stage, refused where it crosses a cut."""

import pytest
import torch
from torch import nn

from tests.support.comparison import assert_trains_exactly

CROSSES = "the step starts a backward of its own"


class Net(nn.Module):
    def __init__(self, way, block=lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh())):
        super().__init__()
        self.way = way
        self.inp = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.out = nn.Linear(8, 1)
        self.double()

    def training_step(self, batch, batch_idx):
        x = batch["x"].clone().requires_grad_()
        first = hidden = self.inp(x)
        for block in self.blocks:
            hidden = block(hidden)
        loss = self.out(hidden).pow(2).mean()
        return loss + self.way(self, loss, x, first, hidden)


def of_input(net, loss, x, first, hidden):
    return torch.autograd.grad(loss, x, create_graph=True)[0].pow(2).mean()


def of_input_in_vain(net, loss, x, first, hidden):
    options = {"allow_unused": True, "materialize_grads": True}
    return torch.autograd.grad(loss, x, create_graph=True, **options)[0].pow(2).mean()


def of_first_hidden(net, loss, x, first, hidden):
    (found,) = torch.autograd.grad(loss, inputs=first, create_graph=True, allow_unused=True)
    return 0 if found is None else found.pow(2).mean()


def of_weight(net, loss, x, first, hidden):
    (found,) = torch.autograd.grad(loss, net.out.weight, create_graph=True, allow_unused=True)
    return 0 if found is None else found.pow(2).mean()


def of_last_hidden(net, loss, x, first, hidden):
    return torch.autograd.grad(loss, hidden, create_graph=True)[0].pow(2).mean()


def own_loss(net, loss, x, first, hidden):
    hidden.pow(2).mean().backward(retain_graph=True)
    return 0


def own_loss_by_function(net, loss, x, first, hidden):
    torch.autograd.backward([hidden.pow(2).mean()], retain_graph=True)
    return 0


WAYS = [
    of_input, of_input_in_vain, of_first_hidden, of_weight, of_last_hidden, own_loss,
    own_loss_by_function,
]  # fmt: skip
BATCH = {"x": torch.randn(8, 8, dtype=torch.float64)}


@pytest.mark.parametrize("way", WAYS)
def test_one_stage_differentiates_as_it_likes(way):
    assert_trains_exactly(Net(way), BATCH, "zb_h1", 1)


@pytest.mark.parametrize(("schedule", "num_ranks"), [("zb_h1", 2), ("zb_v", 1)])
@pytest.mark.parametrize("way", WAYS)
def test_none_crosses_a_cut(way, schedule, num_ranks):
    if way is of_last_hidden:
        assert_trains_exactly(Net(way), BATCH, schedule, num_ranks)
        return
    with pytest.raises(ValueError, match=CROSSES) as refused:
        assert_trains_exactly(Net(way), BATCH, schedule, num_ranks)
    is_named = way is not own_loss_by_function  # which torch lets nobody watch
    assert (__file__ in str(refused.value)) is is_named


class Energy(nn.Module):
    """Goes down the gradient of an energy."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        with torch.enable_grad():
            energy = self.linear(x).tanh().pow(2).sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.1 * slope


class WeighedByItself(Energy):
    def forward(self, x):
        y = self.linear(x)
        weight = self.linear.weight
        (slope,) = torch.autograd.grad(y.pow(2).sum(), weight, create_graph=True, allow_unused=True)
        return y if slope is None else y + 0.01 * x @ slope


@pytest.mark.parametrize(("schedule", "num_ranks"), [("zb_h1", 2), ("zb_v", 2)])
@pytest.mark.parametrize("block", [Energy, WeighedByItself])
def test_a_block_may_differentiate_twice(block, schedule, num_ranks):
    module = Net(lambda *values: 0, block)
    assert_trains_exactly(module, BATCH, schedule, num_ranks)

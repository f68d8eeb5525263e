"""Deep copies of a module have shapes where it has them."""

import copy

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.cut import ModuleCopies
from lightning_pipeoffload.runtime.shapes import RemoteTensor
from lightning_pipeoffload.runtime.users_code import find_slots

HERE = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(2)


@pytest.fixture
def module():
    return Tied()


def leave(module, *names):
    """Let shapes take the places of parameters and buffers, as where another rank owns them."""
    made = {}
    for slot in [slot for slot in find_slots(module) if slot.name in names]:
        shape = RemoteTensor.standing_for(slot, f"{slot.name} (of stage 1)", HERE)
        found = made.setdefault(id(slot.tensor), shape)
        slot.put(found)


def shapes_in(module):
    found = module.state_dict(keep_vars=True)
    return {name for name, value in found.items() if isinstance(value, RemoteTensor)}


def test_copies_and_copies_of_them_follow(module):
    copies = ModuleCopies(module)
    first = copy.deepcopy(module)
    second, part = copy.deepcopy(first), copy.deepcopy(module.norm)
    gone = {"first.weight", "second.weight", "norm.running_mean"}
    leave(module, *gone)
    copies.update_copies()
    assert shapes_in(first) == shapes_in(second) == gone
    assert shapes_in(part) == {"running_mean"}
    assert first.first.weight is first.second.weight is not second.first.weight
    assert isinstance(first.first.weight, nn.Parameter)
    assert "a copy of first.weight (of stage 1)" in repr(first.first.weight)


def test_what_is_here_stays_the_copys_own(module):
    copies = ModuleCopies(module)
    made = copy.deepcopy(module).double().requires_grad_(False)
    with torch.no_grad():
        made.norm.weight.fill_(3.0)
    bias = made.first.bias
    leave(module, "norm.bias")
    copies.update_copies()
    assert made.first.bias is bias
    assert made.norm.weight.tolist() == [3.0, 3.0]
    assert made.norm.bias.dtype == torch.float64
    assert not made.norm.bias.requires_grad


def test_a_copy_of_shapes_has_values_when_the_module_has_them_again(module):
    whole = copy.deepcopy(module)
    leave(module, "first.weight", "second.weight")
    copies = ModuleCopies(module)
    made = copy.deepcopy(module)
    module.first.weight = module.second.weight = whole.first.weight
    copies.update_copies()
    assert not shapes_in(made)
    assert made.first.weight is made.second.weight is not whole.first.weight
    assert torch.equal(made.first.weight, whole.first.weight)


def test_a_copy_with_shapes_cannot_be_called(module):
    copies = ModuleCopies(module)
    made = copy.deepcopy(module)
    leave(module, "norm.bias")
    copies.update_copies()
    made.first(torch.ones(3, 2))
    with pytest.raises(RuntimeError, match=r"cannot run \(.*made.norm.*exchange its weights"):
        made.norm(torch.ones(3, 2))

"""A stored tensor is a tensor like any other, but for when it is read."""

import copy
import io

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime import StoredTensor


class Stored:
    """A stored tensor, and how often it was read."""

    def __init__(self, value):
        self.value = value
        self.count = 0
        self.tensor = StoredTensor(value.to("meta"), self.read)

    def read(self):
        self.count += 1
        return self.value.clone()


@pytest.fixture
def stored():
    return Stored(torch.arange(6.0).reshape(2, 3))


def test_its_shape_is_known_without_reading(stored):
    tensor = stored.tensor
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((2, 3), torch.float32, "cpu")
    assert tensor.to(dtype=torch.float32, device="cpu") is tensor
    assert "(2, 3)" in repr(tensor)
    assert stored.count == 0


def test_a_module_reads_it_once_and_nothing_is_kept(stored):
    module = nn.Linear(3, 2, bias=False)
    module.load_state_dict({"weight": stored.tensor})
    assert torch.equal(module.weight, stored.value)
    assert (stored.count, stored.tensor._kept) == (1, None)


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.mul_(2),
        lambda tensor: tensor.view(-1).mul_(2),
        lambda tensor: tensor.detach().mul_(2),
        lambda tensor: torch._foreach_mul_([tensor], 2),
        lambda tensor: torch.mul(tensor, 2, out=tensor),
        lambda tensor: tensor.data.mul_(2),
        lambda tensor: tensor.numpy().__imul__(2),
        lambda tensor: [row.mul_(2) for row in tensor],
    ],
)
def test_what_is_written_to_it_stays(stored, write):
    write(stored.tensor)
    assert stored.tensor.tolist() == (stored.value * 2).tolist()


def test_copies_and_pickles_have_its_value(stored):
    file = io.BytesIO()
    torch.save({"a": stored.tensor, "b": stored.tensor}, file)
    file.seek(0)
    loaded = torch.load(file)
    copied = copy.deepcopy(stored.tensor)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert type(loaded["a"]) is type(copied) is torch.Tensor
    assert loaded["a"].tolist() == copied.tolist() == stored.value.tolist()


def test_an_optimizer_takes_it_unread(stored):
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    state = {"state": {0: {"momentum_buffer": stored.tensor}}}
    optimizer.load_state_dict({**optimizer.state_dict(), **state})
    assert stored.count == 0
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    assert weight.tolist() == (1 - (stored.value * 0.5 + 1)).tolist()

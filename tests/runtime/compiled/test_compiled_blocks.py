"""Compiled blocks train as plain ones do, with their weight gradients left for W."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_pipeoffload.runtime.weight_grad.queue import WeightGradQueue
from tests.support.comparison import assert_trains_exactly
from tests.support.families import Task

WIDTH = 4
COMPILE = {"backend": "aot_eager"}


class Block(nn.Module):
    """Linear layers that share an input, a product, a norm and a scale."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = self.norm(x)
        return x + self.scale * ((self.gate(y).sigmoid() * self.up(y)) @ self.down)


class Net(nn.Module):
    def __init__(self, block=Block, depth=6):
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 8, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, batch):
    return functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def task(block=Block, step=loss):
    return Task(Net(block), step).double()


def tokens(length=5, count=8):
    return torch.randint(8, (count, length))


@pytest.fixture(autouse=True)
def compile_anew():
    torch.compiler.reset()


@pytest.fixture
def left_for_w(monkeypatch):
    """Count the operations of the weight gradients that are left for W."""
    found = []
    put = WeightGradQueue.put

    def count(self, compute, weights, flops=0):
        found.append(flops)
        put(self, compute, weights, flops)

    monkeypatch.setattr(WeightGradQueue, "put", count)
    return found


@pytest.mark.parametrize(
    ("schedule", "num_ranks"), [("1f1b", 1), ("zb_h1", 2), ("zb_v", 2), ("zb_h1", 3)]
)
def test_as_much_is_left_for_w_as_without(schedule, num_ranks, left_for_w):
    module, batch = task(), tokens()
    assert_trains_exactly(module, batch, schedule, num_ranks)
    uncompiled, left_for_w[:] = sum(left_for_w), []
    assert_trains_exactly(module, batch, schedule, num_ranks, compile=COMPILE)
    assert sum(left_for_w) == uncompiled


@pytest.mark.parametrize("wrap", [False, True])
def test_blocks_that_the_user_has_compiled_are_split(wrap, left_for_w):
    def step(model, batch):  # here, for a copy of a module is compiled no more
        for block in model.blocks:
            if not wrap and block._compiled_call_impl is None:
                block.compile(backend="aot_eager")
        return loss(model, batch)

    module = task(step=step)
    if wrap:
        blocks = [torch.compile(block, backend="aot_eager") for block in module.model.blocks]
        module.model.blocks = nn.ModuleList(blocks)
    assert_trains_exactly(module, tokens(), num_ranks=2)
    assert len(left_for_w) == 4 * (6 * 3 + 1)

"""Which blocks are alike, so that one is measured for all."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_pipeoffload.runtime.cut import CutSettings, classify_blocks
from lightning_pipeoffload.runtime.run import Pipeline, split_into_microbatches
from tests.support.small_modules import Regression, users_step

CPU = torch.device("cpu")
WIDTH = 4


class Block(nn.Module):
    def __init__(self, index, window=None, wide=False):
        super().__init__()
        self.layer_idx = index
        self.window = window
        self.config = {"index": [index], "heads": 2}
        self.weight = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH) if wide else None

    def forward(self, x):
        x = self.weight(x).relu()
        return x if self.wide is None else self.wide(x).unflatten(-1, (2, WIDTH)).sum(-2)


class Dropped(Block):
    def forward(self, x):
        return functional.dropout(self.weight(x), 0.5)


class DroppedByChance(Block):
    def forward(self, x):
        return x if torch.rand(1) < 0.1 else self.weight(x)


class Kept(Block):
    def forward(self, x):
        self.last = self.weight(x)
        return self.last


class Expert(Block):
    def forward(self, x):
        rows = (x[:, 0] > 0).nonzero().flatten()
        return x.index_add(0, rows, self.weight(x[rows]))


class Scaled(Block):
    def forward(self, x):
        return self.weight(x) * (1.0 if self.layer_idx < 4 else 2.0)


def frozen(blocks, index):
    blocks[index].requires_grad_(False)
    return blocks


def hooked(blocks, index):
    blocks[index].weight.weight.register_hook(lambda gradient: gradient)
    return blocks


def make(kind, *windows):
    return [kind(index, *windows[index : index + 1]) for index in range(6)]


@pytest.mark.parametrize(
    ("blocks", "classes"),
    [
        (make(Block), [0, 1, 1, 1, 1, 2]),
        (make(Dropped), [0, 1, 1, 1, 1, 2]),
        (make(Block, 1, 8, None, 8, None, 8), [0, 1, 2, 1, 2, 3]),
        (make(Block, 4, 4, 8, 4, 8, 8), [0, 1, 2, 1, 2, 3]),
        ([Block(i, wide=i in (2, 3)) for i in range(6)], [0, 1, 2, 2, 1, 3]),
        (make(Scaled), [0, 1, 1, 1, 2, 3]),
        (frozen(make(Block), 3), [0, 1, 1, 2, 1, 3]),
        (hooked(make(Block), 3), [0, 1, 1, 2, 1, 3]),
        (make(Expert), [0, 1, 2, 3, 4, 5]),
        (make(DroppedByChance), [0, 1, 2, 3, 4, 5]),
    ],
    ids=["alike", "dropout", "windows_or_none", "windows", "wide", "scales", "frozen", "hooked",
         "experts", "layer_drop"],
)  # fmt: skip
def test_blocks_are_alike_that_do_the_same_and_are_made_alike(blocks, classes):
    module = Regression(nn.ModuleList(blocks))
    pipeline = Pipeline(module, 0, CutSettings((0, 1)), CPU)
    first, *_ = split_into_microbatches(
        pipeline, torch.ones(2, WIDTH), 1, users_step(module.step), "train", 0
    )
    assert classify_blocks(pipeline.chain, first.record) == classes
    pipeline.detach()


@pytest.mark.parametrize(
    ("kind", "num_calls"),
    [(Block, 6 + 3), (Dropped, 6 + 3), (DroppedByChance, 6 + 6), (Kept, 6 + 6)],
)
def test_the_comparison_runs_one_of_alike_blocks_that_leave_only_outputs(kind, num_calls):
    module, calls = Regression(nn.ModuleList(make(kind))), []
    for block in module.blocks:
        block.weight.register_forward_hook(lambda *_: calls.append(""))
    pipeline = Pipeline(module, 0, CutSettings((0, 1)), CPU)
    torch.manual_seed(0)
    split_into_microbatches(pipeline, torch.ones(2, WIDTH), 1, users_step(module.step), "train", 0)
    assert len(calls) == num_calls
    pipeline.detach()

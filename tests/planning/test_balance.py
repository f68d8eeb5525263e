"""The line on what was cut: each rank's share of the work, and what makes them unlike."""

import pytest
import torch
from torch import nn

from lightning_pipeoffload.planning.balance import describe_cut
from lightning_pipeoffload.planning.report import predict_figures
from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.small_modules import Regression, call_step, linear_blocks


class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(linear_blocks(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def with_a_head(depth, size):
    module = Regression(linear_blocks(depth))
    module.head = nn.Linear(4, size)
    return module


def with_a_deep_block():
    return Regression([Deep(2), Deep(20), Deep(2)])


LINES = [
    (
        lambda: with_a_head(4, 1),
        {},
        "Cut: blocks.0 .. 3, 4 blocks; work of the ranks: 57.1 %, 42.9 %.",
    ),
    (
        lambda: with_a_head(4, 400),
        {},
        "Rank 1 has 1.9 times the mean: the code after the blocks has 95.2 % of the work; "
        'name these too: blocks=["blocks.*", "head"].',
    ),
    (
        with_a_deep_block,
        {"blocks": "blocks"},
        "blocks.1 has 79.2 % of the work; name its parts: "
        'blocks=["blocks.0", "blocks.1.layers.*", "blocks.2"].',
    ),
    (
        lambda: with_a_head(8, 1),
        {"split": [7, 1]},
        "8 blocks make no better stages; use fewer devices, or leave split at auto.",
    ),
]


@pytest.mark.parametrize(("make", "options", "part"), LINES)
def test_what_was_cut_and_why_ranks_are_unlike(make, options, part):
    pipeline = InProcessPipeline(make(), build("1f1b", 2, 2), call_step, **options)
    pipeline.run(torch.randn(2, 4), 1)
    report = predict_figures(pipeline.plan, pipeline.ranks[0], None, False)
    assert sum(stage["work"] for stage in report["stages"]) == pytest.approx(1)
    line = describe_cut(report, pipeline.ranks[0])
    assert part in line
    assert ("times the mean" in line) == (part[:3] != "Cut")

"""Backwards find in weights, buffers and attributes that steps write what their forwards saw."""

import copy

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.schedule import build
from tests.support.small_modules import Regression, call_step, descend


class Block(nn.Linear):
    """Writes what it computes with, each time."""

    def __init__(self, write):
        super().__init__(4, 4)
        self.write = write
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.write(self)
        return (super().forward(x) * self.scale).tanh()


class Behind(Regression):
    """Writes behind its blocks."""

    def __init__(self, write):
        super().__init__([nn.Linear(4, 4) for _ in range(2)])
        self.write = write
        self.register_buffer("scale", torch.ones(4))
        self.kept, self.table = torch.ones(4), {"kept": torch.ones(4)}

    def step(self, x):
        for layer in (self.embed, *self.blocks):
            x = layer(x)
        self.write(self)
        return self.head(x * self.scale * self.kept * self.table["kept"]).pow(2).mean()


def nothing(module):
    pass


def scales_data(module):
    getattr(module, "head", module).weight.data.mul_(0.9)


@torch.no_grad()
def scales(module):
    getattr(module, "head", module).weight.mul_(0.9)


@torch.no_grad()
def clamps(module):
    getattr(module, "head", module).weight.clamp_(-0.3, 0.3)


def gives_new_data(module):
    module.head.weight.data = module.head.weight.data * 0.9


def scales_buffer(module):
    module.scale.mul_(0.9)


def scales_buffer_data(module):
    module.scale.data.mul_(0.9)


def scales_attribute_data(module):
    module.kept.data.mul_(0.9)
    module.table["kept"].data.mul_(0.9)


def train(module, schedule, num_ranks, **options):
    """Train three steps beside one device; return all weights of both."""
    torch.manual_seed(0)
    x, plain = torch.randn(3, 8, 4, dtype=torch.float64), copy.deepcopy(module)
    pipeline = InProcessPipeline(module, build(schedule, num_ranks, 4), call_step, **options)
    for batch in x:
        pipeline.run(batch, 2)
        for part in batch.split(2):
            (call_step(plain, part) / 4).backward()
        for rank in pipeline.ranks:
            descend(rank.ownership.local_tensors().values())
        descend(plain.parameters())
    held = {n: t for r in pipeline.ranks for n, t in r.ownership.local_tensors().items()}
    return {name: held[name] for name in plain.state_dict()}, plain.state_dict()


def assert_equal(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name].detach(), value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("write", "schedule", "num_ranks", "recompute"),
    [
        (scales_data, "zb_h1", 3, "none"),
        (scales_data, "zb_v", 1, "full"),
        (scales, "zb_v", 2, "none"),
        (scales, "zb_h1", 1, "full"),
        (clamps, "zb_h1", 3, "full"),
        (scales_buffer, "zb_h1", 3, "none"),
        (scales_buffer_data, "zb_v", 1, "none"),
        (scales_buffer_data, "zb_h1", 2, "full"),
    ],
)
def test_of_blocks(write, schedule, num_ranks, recompute):
    module = Regression([Block(write) for _ in range(6)]).double()
    assert_equal(*train(module, schedule, num_ranks, recompute=recompute))


@pytest.mark.parametrize(
    "write",
    [
        scales_data,
        scales,
        gives_new_data,
        clamps,
        scales_buffer,
        scales_buffer_data,
        scales_attribute_data,
    ],
)
def test_behind_the_blocks(write):
    assert_equal(*train(Behind(write).double(), "gpipe", 2))


def test_attributes_that_are_scaled_without_a_version_belong_to_each_stage():
    class Before(Behind):
        def step(self, x):
            scales_attribute_data(self)
            scales_buffer_data(self)
            return super().step(x * self.kept * self.table["kept"] * self.scale)

    assert_equal(*train(Before(nothing).double(), "zb_v", 1))


def test_casts_of_a_weight_that_is_written_are_not_shared():
    class Halving(Regression):
        def forward(self, x):
            for layer in (self.embed, *self.blocks):
                x = layer(x)
            self.head.weight.data.mul_(0.5)
            return self.head(x)

    module = Halving([nn.Linear(4, 4) for _ in range(2)])
    plain, x = copy.deepcopy(module), torch.randn(8, 4)
    pipeline = InProcessPipeline(module, build("1f1b", 2, 4), cast_step)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        losses = pipeline.run(x, 2)
    expected = []
    for part in x.split(2):
        with torch.autocast("cpu", torch.bfloat16):
            expected.append(cast_step(plain, part).detach())
    torch.testing.assert_close(losses, expected)


def cast_step(module, x):
    return module(x).float().pow(2).mean()


def test_statistics_that_no_backward_reads_are_not_kept():
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    pipeline = InProcessPipeline(Regression(blocks), build("gpipe", 2, 4), call_step)
    pipeline.run(torch.randn(8, 4), 2)
    stages = [stage for rank in pipeline.ranks for stage in rank.stages.values()]
    assert [stage._context.written_tensors() for stage in stages] == [[], []]


class ScaledLater(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.writes = ""

    def forward(self, x):
        x = self.linear(x) * self.scale
        if self.writes == "in place":
            self.scale.mul_(0.9)
        if self.writes == "anew":
            self.scale = self.scale * 0.9
        return x


@pytest.mark.parametrize(("schedule", "num_ranks"), [("zb_h1", 2), ("1f1b", 1), ("zb_v", 2)])
def test_a_buffer_that_only_later_steps_write_in_place_is_refused_by_name(schedule, num_ranks):
    torch.manual_seed(0)
    module = Regression([ScaledLater() for _ in range(4)])
    pipeline = InProcessPipeline(module, build(schedule, num_ranks, 4), call_step)
    pipeline.run(torch.randn(8, 4), 2)
    for writes in ("anew", "in place"):
        for rank in pipeline.ranks:
            for block in rank.module.blocks:
                block.writes = writes
        if writes == "anew":
            pipeline.run(torch.randn(8, 4), 2)
    with pytest.raises(RuntimeError, match=r"writes the buffer blocks\.\d\.scale in place, which"):
        pipeline.run(torch.randn(8, 4), 2)

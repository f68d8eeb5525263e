"""Hooks and backwards of the user's that read or write what the module keeps."""

import inspect
import re

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.compiled.block_compiler import warn_once
from tests.support.comparison import assert_trains_exactly

HERE = "# <- named in the message"
PIPELINES = [("zb_h1", 2), ("zb_v", 2)]


class Block(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return x + super().forward(x).tanh()


class Net(nn.Module):
    block = Block

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.out = nn.Linear(4, 1)
        self.double()

    def embed(self, x):
        return self.inp(x)

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden).pow(2).mean()


class Keeping(Block):
    def forward(self, x):
        self.seen = x.detach().abs().mean()
        return super().forward(x)


# Read in the backward, written in a forward


class HookedBlock(Keeping):
    def __init__(self):
        super().__init__()
        self.register_full_backward_hook(self.scale)

    def scale(self, module, given, gradients):
        return (given[0] * self.seen,)  # <- named in the message


class Stacking(Block):
    def __init__(self):
        super().__init__()
        self.stack = []
        self.register_full_backward_hook(self.scale)

    def forward(self, x):
        self.stack.append(x.detach())
        return super().forward(x)

    def scale(self, module, given, gradients):
        return (given[0] * self.stack.pop(),)  # <- named in the message


class WithTensorHook(Keeping):
    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda g: g / self.seen)  # <- named in the message
        return y


class Remembering(torch.autograd.Function):
    seen = None

    @staticmethod
    def forward(ctx, x):
        Remembering.seen = x.detach().clone()
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Remembering.seen.abs()


class WithFunction(Block):
    def forward(self, x):
        return Remembering.apply(super().forward(x))


class WrittenBehind(Net):
    scale = 1.0

    def embed(self, x):
        hidden = super().embed(x)
        hidden.register_hook(lambda g: g * self.scale)  # <- named in the message
        return hidden

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.scale = self.scale * 1.5
        return loss


# Written and read by the backward alone


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.block.count += 1
        return gradient * ctx.block.count, None


class CountingBlock(Block):
    count = 0

    def forward(self, x):
        return Counting.apply(super().forward(x), self)


def net_of(kind):
    return type(kind.__name__, (Net,), {"block": kind})()


REFUSED = [HookedBlock, Stacking, WithTensorHook, WrittenBehind]
BATCH = torch.randn(8, 4, dtype=torch.float64)


def make(kind):
    return kind() if issubclass(kind, Net) else net_of(kind)


def line_of(kind):
    lines, first = inspect.getsourcelines(kind)
    (number,) = (first + i for i, line in enumerate(lines) if HERE in line)
    return f"{__file__}:{number}:"


@pytest.mark.parametrize(("schedule", "num_ranks"), PIPELINES)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_another_order_would_change_is_refused(kind, schedule, num_ranks):
    with pytest.raises(RuntimeError, match="the step writes, is read in a backward") as refused:
        assert_trains_exactly(make(kind), BATCH, schedule, num_ranks)
    assert line_of(kind) in str(refused.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_one_stage_runs_it_as_one_device(kind):
    assert_trains_exactly(make(kind), BATCH, "1f1b", 1)


def test_what_a_class_holds_for_a_backward_is_refused():
    with pytest.raises(ValueError, match=r"the step writes Remembering\.seen"):
        assert_trains_exactly(make(WithFunction), BATCH, "zb_h1", 2)


def test_a_step_that_writes_attributes_and_hooks_tensors_is_told_so_once(caplog):
    warn_once.cache_clear()
    with pytest.raises(RuntimeError, match="is read in a backward"):
        assert_trains_exactly(make(WithTensorHook), BATCH, "zb_h1", 2)
    (notice,) = [r.message for r in caplog.records if "hook on a tensor" in r.message]
    assert "test_backward_watch.py" in notice


@pytest.mark.parametrize(("schedule", "num_ranks"), PIPELINES)
def test_what_only_the_blocks_own_backwards_use_is_exact(schedule, num_ranks):
    pipeline = assert_trains_exactly(net_of(CountingBlock), BATCH, schedule, num_ranks)
    for rank in pipeline.ranks:
        for stage in rank.local_stages:
            for index in rank.partition[stage].blocks:
                assert rank.module.blocks[index].count == 4


def test_a_hook_that_writes_its_weight_is_refused():
    class Stepping(Net):
        def training_step(self, batch, batch_idx):
            if not self.inp.weight._post_accumulate_grad_hooks:
                self.inp.weight.register_post_accumulate_grad_hook(self.descend)
            return super().training_step(batch, batch_idx)

        def descend(self, weight):
            weight.data.sub_(0.1 * weight.grad)

    with pytest.raises(ValueError, match=re.escape("a hook on inp.weight writes the weight")):
        assert_trains_exactly(Stepping(), BATCH, "zb_h1", 2)


# Hooks on what other stages have


class HookedBetween(Net):
    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch)
        for block in self.blocks:
            hidden = block(hidden)
            hidden.register_hook(lambda g: g * 0.5)
            hidden.retain_grad()
        return self.out(hidden).pow(2).mean()


@pytest.mark.parametrize(("schedule", "num_ranks"), PIPELINES)
def test_a_hook_on_a_value_is_called_where_the_value_is(schedule, num_ranks):
    assert_trains_exactly(HookedBetween(), BATCH, schedule, num_ranks)


def binds_at_once(net, hidden):
    scale = 2.0
    for block in net.blocks:
        hidden = block(hidden)
        hidden.register_hook(lambda g, scale=scale: g * scale)
        scale *= 0.5
    return hidden


class Binding(Net):
    def __init__(self, way):
        super().__init__()
        self.way = way

    def training_step(self, batch, batch_idx):
        return self.out(self.way(self, self.inp(batch))).pow(2).mean()


@pytest.mark.parametrize(("schedule", "num_ranks"), PIPELINES)
def test_a_hook_that_has_its_own_value_is_exact(schedule, num_ranks):
    assert_trains_exactly(Binding(binds_at_once), BATCH, schedule, num_ranks)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Outer(nn.Module):
    def __init__(self, embeds):
        super().__init__()
        self.inp = nn.Linear(4, 4) if embeds else nn.Identity()
        self.inner = Inner()
        self.double()
        self.inner.register_full_backward_hook(self.look)
        self.embeds = embeds

    def look(self, module, given, gradients):
        return (given[0] * 2,) if self.embeds else None

    def training_step(self, batch, batch_idx):
        return self.inner(self.inp(batch)).pow(2).mean()


@pytest.mark.parametrize(("schedule", "num_ranks"), PIPELINES)
def test_a_backward_hook_on_what_a_cut_goes_through_is_refused(schedule, num_ranks):
    with pytest.raises(ValueError, match="a backward hook is registered on inner, which stage 0"):
        assert_trains_exactly(Outer(embeds=True), BATCH, schedule, num_ranks)
    assert_trains_exactly(Outer(embeds=True), BATCH, "zb_h1", 1)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_backward_hook_on_what_is_given_no_gradient_is_called_at_its_end():
    assert_trains_exactly(Outer(embeds=False), BATCH, "zb_h1", 2)

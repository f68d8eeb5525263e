"""What B runs again sees what F saw, though other microbatches' forwards came in between."""

import itertools
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload.runtime.step.checkpoint_replay import is_repeatable
from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.small_modules import Regression, call_step, compare_with_plain

SETTINGS = [("gpipe", 1), ("zb_v", 2)]


class Reading(nn.Linear):
    """A block that reads a factor which is not among its arguments; it may checkpoint itself."""

    def __init__(self, read, how):
        super().__init__(4, 4)
        self.read, self.how, self.mask, self.calls = read, how, None, 0

    def forward(self, x):
        if self.how in ("partly", "reentrant"):
            return x + checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")
        return self.inner(x)

    def inner(self, x):
        self.calls += 1
        return torch.tanh(super().forward(x) * self.read(self))


class Setting(Regression):
    """A step that writes, before its blocks, what they read; it may checkpoint them."""

    def __init__(self, write, read, how):
        super().__init__([Reading(read, how) for _ in range(4)])
        self.write, self.how = write, how
        self.table = {"masks": [None]}
        self.register_buffer("kept", torch.ones(()))
        for block in self.blocks:
            block.__dict__.update(owner=self)

    def forward(self, x):
        self.write(self, x.detach().abs().mean())
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.how == "by step" else block(x)
        return self.head(x)


def on_the_module(module, mask):
    module.mask = mask


def on_the_blocks(module, mask):
    for block in module.blocks:
        block.mask = mask


def in_a_container(module, mask):
    module.table["masks"][0] = mask


def in_a_buffer(module, mask):
    module.kept.copy_(mask)


def nowhere(module, mask):
    pass


WAYS = {
    on_the_module: lambda block: block.owner.mask,
    on_the_blocks: lambda block: block.mask,
    in_a_container: lambda block: block.owner.table["masks"][0],
    in_a_buffer: lambda block: block.owner.kept,
    nowhere: lambda block: 1,
}


WORDS = {"full": r'is recomputed \(recompute="full"\)', "by step": "is checkpointed"}
HOWS = ["full", "by step", "partly", "reentrant"]


def refusal(module, how, schedule="zb_h1", num_ranks=2):
    options = {"recompute": "full"} if how == "full" else {}
    pipeline = InProcessPipeline(module, build(schedule, num_ranks, 4), call_step, **options)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        pipeline.run(torch.randn(8, 4).double(), 2)
    return str(caught.value)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (on_the_module, r"self\.mask, which the step writes, is read in a backward"),
        (on_the_blocks, r"self\.blocks\.\d\.mask, which the step writes, is read in a backward"),
        (in_a_container, r"self\.table, which the step writes, is read in a backward"),
        (in_a_buffer, r"blocks\.\d is checkpointed and does not compute again"),
    ],
)
@pytest.mark.parametrize("how", HOWS)
def test_what_a_block_reads_in_addition_to_its_arguments_is_refused(write, name, how):
    if write is in_a_buffer and how == "full":
        how = "partly"  # "full" keeps the tensors that steps write
    module = Setting(write, WAYS[write], how).double()
    assert re.match(name, refusal(module, how))


@pytest.mark.parametrize(("schedule", "num_ranks"), SETTINGS)
def test_what_a_block_counts_it_counts_once(schedule, num_ranks):
    module = Setting(nowhere, WAYS[nowhere], "full").double()
    batches = [torch.randn(8, 4).double()] * 2
    pipeline, _ = compare_with_plain(module, schedule, num_ranks, batches, recompute="full")
    for rank in pipeline.ranks:
        own = {
            index for stage in rank.tensors.local_stages for index in rank.cut.stages[stage].blocks
        }
        assert [rank.module.blocks[index].calls for index in own] == [2 * 4] * len(own)


class CountingHead(Regression):
    """Checkpoints code after its blocks that keeps what it computes."""

    def __init__(self):
        super().__init__([nn.Linear(4, 4) for _ in range(4)])
        self.outs = []

    def step(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return checkpoint(self.note, x, use_reentrant=False).pow(2).mean()

    def note(self, x):
        self.outs.append(len(x))
        return self.head(x)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_a_head_appends_it_appends_once(schedule):
    pipeline = InProcessPipeline(CountingHead().double(), build(schedule, 2, 4), call_step)
    pipeline.run(torch.randn(8, 4).double(), 2)
    assert pipeline.ranks[-1].module.outs == [2] * 4


class Numbers:
    """Values that nobody finds, for they are in no attribute."""

    def __init__(self):
        numbers = itertools.count(1)
        self.draw = lambda: next(numbers)

    def __deepcopy__(self, memo):
        return Numbers()


@pytest.mark.parametrize("how", HOWS[:2])
def test_what_changes_unseen_is_refused_in_the_first_step(how):
    draw = Numbers().draw
    module = Setting(nowhere, lambda block: draw(), how).double()
    assert re.match(rf"blocks.\d {WORDS[how]} and does not", refusal(module, how))


def test_a_checkpointed_block_that_fails_only_in_the_backward_is_named():
    def read(block):
        is_in_backward = torch._C._current_graph_task_id() >= 0
        return torch.ones(3 if is_in_backward else 4).double()

    module = Setting(nowhere, read, "full").double()
    assert re.match(rf"blocks.\d {WORDS['full']} and does not", refusal(module, "full"))


def test_a_checkpoint_is_torchs_own_again_without_a_pipeline():
    module = Setting(nowhere, WAYS[nowhere], "by step")
    pipeline = InProcessPipeline(module, build("1f1b", 2, 4), call_step)
    pipeline.ranks[0].detach()
    x = torch.randn(2, 4, requires_grad=True)
    checkpoint(lambda y: y * 2, x, use_reentrant=False).sum().backward()
    assert x.grad.tolist() == [[2.0] * 4] * 2


def test_results_are_compared_where_they_are_repeatable():
    assert is_repeatable(torch.device("cpu"))
    assert not is_repeatable(torch.device("cuda"))
    torch.use_deterministic_algorithms(True)
    try:
        assert is_repeatable(torch.device("cuda"))
    finally:
        torch.use_deterministic_algorithms(False)


class Normed(nn.Module):
    """A block that counts, and checkpoints what it computes, with statistics or without."""

    def __init__(self, has_statistics):
        super().__init__()
        norm = nn.BatchNorm1d(4) if has_statistics else nn.LayerNorm(4)
        self.layers = nn.Sequential(nn.Linear(4, 4), norm, nn.Tanh())
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def inner(self, x):
        self.count += 1
        return self.layers(x)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def regression_with_statistics(*blocks):
    return Regression([Normed(index in blocks) for index in range(4)]).double()


def test_statistics_that_the_backward_updates_after_later_forwards_are_refused():
    module = regression_with_statistics(1)
    with pytest.raises(ValueError, match="blocks.1 is checkpointed and updates blocks.1.*full"):
        compare_with_plain(module, "zb_h1", 2, [torch.randn(8, 4).double()])


def test_statistics_of_the_last_stage_are_updated_in_the_order_of_one_device():
    module = regression_with_statistics(3)
    compare_with_plain(module, "zb_h1", 2, [torch.randn(8, 4).double()])

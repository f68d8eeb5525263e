"""Blocks that ask for values: their shapes are found as if every search found all."""

import pytest
import torch
from torch import nn

from lightning_pipeoffload.schedule import build
from tests.support.pairs import pairs
from tests.support.small_modules import (
    Regression,
    Step,
    compare_with_plain,
    linear_blocks,
    loss_of,
    run_pipeline,
    through,
)

WIDTH = 4


class Mixture(nn.Module):
    """Linear experts, of which each row goes to some."""

    def __init__(self, dispatch, num_experts=4):
        super().__init__()
        self.gate = nn.Linear(WIDTH, num_experts)
        self.experts = nn.ModuleList(linear_blocks(num_experts))
        self.dispatch = dispatch

    def forward(self, x):
        return x + self.dispatch(self, x)


def top_2(block, x):
    weights, chosen = block.gate(x).softmax(-1).topk(2)
    return weights, chosen


def each_expert(block, x):
    weights, chosen = top_2(block, x)
    out = torch.zeros_like(x)
    for number, expert in enumerate(block.experts):
        rows, places = torch.where(chosen == number)
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
    return out


def with_a_mask(block, x):
    scores, chosen = block.gate(x).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for number, expert in enumerate(block.experts):
        mask = chosen == number
        if mask.any():
            out[mask] = expert(x[mask]) * scores[mask].unsqueeze(1)
    return out


def sorted_by_expert(block, x):
    scores, chosen = block.gate(x).softmax(-1).max(-1)
    order = chosen.argsort()
    counts = torch.bincount(chosen, minlength=len(block.experts))
    parts, start = [], 0
    for expert, count in zip(block.experts, counts.tolist(), strict=True):
        parts.append((order[start : start + count], expert))
        start += count
    out = torch.zeros_like(x)
    for rows, expert in parts:
        if len(rows):
            out = out.index_copy(0, rows, expert(x[rows]) * scores[rows, None])
    return out


def never_the_last(block, x):
    """The last expert gets no row and no gradient, in no step: weight decay leaves it alone."""
    chosen = block.gate(x)[:, :-1].argmax(-1)
    out = torch.zeros_like(x)
    for number in chosen.unique().tolist():
        rows = (chosen == number).nonzero()[:, 0]
        out = out.index_add(0, rows, block.experts[number](x[rows]))
    return out


def until_small(block, x):
    h = block.experts[0](x)
    while h.norm() > 1:
        h = h / 2
    return h


def asserted(block, x):
    h = block.experts[1](x)
    assert not torch.isnan(h).any()
    h[h > -1e6].max()  # of nothing there is no largest
    return h


DISPATCHES = [each_expert, with_a_mask, sorted_by_expert, never_the_last, until_small, asserted]
PIPELINES = [("zb_h1", 2), ("zb_v", 2), ("zb_h1", 4)]


@pytest.mark.parametrize(("dispatch", "pipeline"), pairs(DISPATCHES, PIPELINES))
def test_blocks_may_ask_for_values(dispatch, pipeline):
    module = Regression([Mixture(dispatch) for _ in range(4)], WIDTH).double()
    compare_with_plain(module, *pipeline, [torch.randn(24, WIDTH).double() for _ in range(2)], 6)


class Pruning(Mixture):
    def forward(self, x):
        h = self.experts[0](x)
        return h[h.norm(dim=-1) > 1]


class Counting(Mixture):
    """Tells how many rows there were, for other stages to use."""

    def forward(self, x):
        rows = (self.gate(x)[:, 0] > 0).nonzero()
        return super().forward(x), len(rows)


class Keeping(Mixture):
    """Keeps a loss for the step to find."""

    def forward(self, x):
        self.loss = self.gate(x).logsumexp(-1).mean()
        return super().forward(x)


class FillingWithNumbers(Mixture):
    """Puts a number into the caller's list, for the step to use."""

    def forward(self, x, kept):
        kept.append(self.gate(x).mean().item())
        return super().forward(x)


def with_numbers(m, x):
    kept = []
    for block in m.blocks:
        x = block(x, kept)
    return loss_of(m, x) * sum(kept)


def always_wrong(block, x):
    if x.sum() > 0:
        raise RuntimeError("too large")
    raise RuntimeError("too small")


def first_of_each(m, x):
    x = m.embed(x)
    for block in m.blocks:
        x, _ = block(x)
    return loss_of(m, x)


def with_losses(m, x):
    loss = loss_of(m, through(m.blocks, x))
    return loss + sum(block.loss for block in m.blocks)


def step_of(function, make):
    return Step(function, [make() for _ in range(4)])


def plain(m, x):
    return loss_of(m, through(m.blocks, m.embed(x)))


REFUSED = {
    "pruned": (
        step_of(plain, lambda: Pruning(None)),
        r"blocks.1 returned .*, 4\]\), .* must not depend on the values of its input",
    ),
    "counting": (
        step_of(first_of_each, lambda: Counting(each_expert)),
        "blocks.0 reads values .* and returns numbers or objects with its tensors",
    ),
    "keeping": (
        step_of(with_losses, lambda: Keeping(each_expert)),
        "blocks.0 reads values .* and puts into an attribute, an argument or a hook what is used",
    ),
    "number_in_a_list": (
        step_of(with_numbers, lambda: FillingWithNumbers(each_expert)),
        r"blocks.0 reads values .*item\(\).* and puts into an attribute, an argument or a hook",
    ),
    "always_wrong": (
        step_of(plain, lambda: Mixture(always_wrong)),
        r"blocks.0 reads values .* and fails then \(RuntimeError: too large",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_depends_on_assumed_values_is_refused(case):
    module, message = REFUSED[case]
    with pytest.raises((ValueError, RuntimeError), match=message):
        run_pipeline(module, build("zb_h1", 2, 2), torch.randn(8, 4), 4)


# Steps that fail after the blocks for want of values


class Measuring(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        self.size = x.pow(2).mean()
        return x


def check(x):
    assert (x.abs() < 1e9).all(), "too large"


def alarm_after(m, x):
    x = through(m.blocks, m.embed(x))
    check(x)
    return loss_of(m, x) + sum(block.size for block in m.blocks)


def two_alarms_after(m, x):
    x = through(m.blocks, m.embed(x))
    assert (x.abs() < 1e9).any(), "too large"
    assert not (x.abs() > 1e9).any()
    return loss_of(m, x) + sum(block.size for block in m.blocks)


def sizes_in_a_tensor(m, x):
    x = through(m.blocks, m.embed(x))
    total = x.new_zeros(())
    for block in m.blocks:
        total += block.size
    return loss_of(m, x) + total


@pytest.mark.parametrize("step", [alarm_after, sizes_in_a_tensor])
def test_values_of_blocks_are_used_after_what_reads_values(step):
    compare_with_plain(
        step_of(step, lambda: Measuring(4, 4)).double(), "zb_h1", 2, [torch.randn(4, 4).double()]
    )


def test_what_blocks_keep_is_refused_where_the_trace_does_not_come():
    module = step_of(two_alarms_after, lambda: Measuring(4, 4))
    with pytest.raises(ValueError, match=r"AssertionError: too large\) .* what blocks.0 has"):
        run_pipeline(module, build("zb_h1", 2, 2), torch.randn(4, 4), 2)


# Sizes from the batch


class Packed(Regression):
    """Takes the padding out before the blocks."""

    def __init__(self, pack):
        super().__init__(linear_blocks(4))
        self.pack = pack

    def step(self, batch):
        return self.pack(self, batch["x"], batch["mask"])


def packed(m, x, mask):
    x = through(m.blocks, m.embed(x)[mask])
    out = m.head(x.new_zeros(*mask.shape, WIDTH).index_put((mask,), x))
    return out.pow(2).mean()


def cut_to_the_longest(m, x, mask):
    return loss_of(m, through(m.blocks, m.embed(x)[:, : mask.sum(1).max()]))


def packed_on_the_way(m, x, mask):
    x = through(m.blocks[:2], m.embed(x))
    return loss_of(m, through(m.blocks[2:], x.masked_select(mask.unsqueeze(-1)).view(-1, WIDTH)))


def skip_around(m, x, mask):
    packed = m.embed(x)[mask]
    return loss_of(m, through(m.blocks, packed) + packed)


def dropped_at_random(m, x, mask):
    keep = mask & (torch.rand(mask.shape) < 0.5)
    keep[:, 0] = True
    return loss_of(m, through(m.blocks, m.embed(x)[keep]))


def padded(count=8, length=6):
    lengths = torch.randint(1, length + 1, (count, 1))
    return {"x": torch.randn(count, length, WIDTH).double(), "mask": torch.arange(length) < lengths}


PACKING = [packed, cut_to_the_longest, skip_around, packed_on_the_way, dropped_at_random]


@pytest.mark.parametrize(("pack", "pipeline"), pairs(PACKING, PIPELINES))
def test_sizes_may_come_from_the_batch(pack, pipeline):
    compare_with_plain(Packed(pack).double(), *pipeline, [padded(), padded()], 2)


# Booleans from the batch


def mask_unless_all_ones(m, x, mask):
    first = m.embed(x)
    if not mask.all():
        first = first * mask.unsqueeze(-1) * 1.5
    x = first = first + 1
    for block in m.blocks:
        x = block(x + first)
    return loss_of(m, x)


def cut_if_all_ones(m, x, mask):
    x = m.embed(x)
    return loss_of(m, through(m.blocks, x[:, :3] if mask.all() else x))


def read_from_a_written_copy(m, x, mask):
    first = m.embed(x)
    counts = torch.zeros(6)
    counts[:] = mask.sum(0)
    if counts[-1] > 0:
        first = first * 2
    for index, block in enumerate(m.blocks):
        if index == 2 and torch.equal(mask, torch.ones_like(mask)):
            x = x + 1
        x = block(x + first)
    return loss_of(m, x)


def drawn_from_the_batch(m, x, mask):
    first = m.embed(x)
    if torch.bernoulli(mask * 0.5).sum() > 5:
        first = first * 2
    for block in m.blocks:
        x = block(x + first)
    return loss_of(m, x)


def masks(*lengths):
    """Two rows of each length."""
    mask = torch.arange(6) < torch.tensor(lengths).repeat_interleave(2)[:, None]
    return {"x": torch.randn(len(mask), 6, WIDTH).double(), "mask": mask}


BRANCHING = [
    mask_unless_all_ones,
    cut_if_all_ones,
    read_from_a_written_copy,
    drawn_from_the_batch,
]


@pytest.mark.parametrize(("step", "pipeline"), pairs(BRANCHING, PIPELINES))
def test_a_step_may_branch_on_its_batch(step, pipeline):
    batches = [masks(6, 4, 6, 6), masks(4, 4, 4, 4), masks(3, 6, 6, 6)]
    found, _ = compare_with_plain(Packed(step).double(), *pipeline, batches, 2)
    assert len(found.ranks[0].records.by_key) == 2

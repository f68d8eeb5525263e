"""Records of new lengths are derived from traced ones, where these show how they depend on them."""

from functools import partial

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.cut.derived_records import RecordFamily
from lightning_pipeoffload.runtime.run import split_into_microbatches
from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.pairs import pairs
from tests.support.small_modules import Regression, Step, call_step, compare_with_plain, loss_of

WIDTH = 4


class Attention(nn.Module):
    """Looks at all places of ``x``, or of ``other``, that are not masked."""

    def __init__(self, cut=lambda x: x):
        super().__init__()
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cut = cut

    def forward(self, x, mask=None, other=None):
        other = x if other is None else other
        scores = x @ self.key(other).transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -1e4)
        return self.cut(x + scores.softmax(-1) @ self.value(other))


def plain(module, batch):
    x = module.embed(batch["x"])
    for block in module.blocks:
        x = block(x)
    return loss_of(module, x)


def with_positions(module, batch):
    positions = torch.arange(batch["x"].shape[1])
    x = module.embed(batch["x"]) + positions[:, None] / 100
    for block in module.blocks:
        x = block(x)
    return loss_of(module, x)


def masked(module, batch):
    mask = None if batch["mask"].all() else batch["mask"]
    x = module.embed(batch["x"])
    for block in module.blocks:
        x = block(x, mask)
    return loss_of(module, x)


def masked_anew(module, batch):
    """The mask is made by the step, at the batch's length, and then written."""
    mask = torch.ones(batch["mask"].shape, dtype=torch.bool)
    mask.masked_fill_(~batch["mask"], False)
    return masked(module, {**batch, "mask": mask})


def across(module, batch):
    """The blocks of a decoder see the encoder's output, which crosses the cuts between them."""
    other, x = module.embed(batch["x"]), module.embed(batch["y"])
    for index, block in enumerate(module.blocks):
        if index < 2:
            other = block(other)
        else:
            x = block(x, other=other)
    return loss_of(module, x)


def carried(module, batch):
    """The first residual is used after all blocks, by another function of the length."""
    first = x = module.embed(batch["x"])
    table = x @ x.transpose(-1, -2)
    for block in module.blocks:
        x = block(x)
    return loss_of(module, x + first + table.flatten(1).mean(-1)[:, None, None])


def batch_of(length, other=3, padded=True):
    x = torch.randn(4, length, WIDTH).double()
    mask = torch.ones(4, length, dtype=torch.bool)
    mask[::2, 2 if padded else length :] = False
    return {"x": x, "y": torch.randn(4, other, WIDTH).double(), "mask": mask}


def module_of(step, cut=lambda x: x):
    return Step(step, [Attention(), Attention(cut), Attention(), Attention()]).double()


def derived_in(pipeline):
    """Return the lengths whose records were derived, and compare the ranks."""
    found = [
        [key[0][0][-1] for key, record in rank.records.by_key.items() if record.is_derived]
        for rank in pipeline.ranks
    ]
    assert all(each == found[0] for each in found)
    return found[0]


def sizes_of(record):
    operations = [each.sizes for each in record.work.digests]
    return record.outputs, record.carried_values, record.work.training_flops, operations


TRACED = (3, 9, 4, 6, 7)
PAIRS = ((3, 9), (12, 4), (5, 5), (7, 8), (10, 6), (8, 3), (4, 7), (9, 9))
# The step, what cuts a block's output, the batches, and the lengths that are derived.
STEPS = {
    "between": (plain, None, [(n,) for n in (*TRACED, 5, 8, 5)], {5, 8}),
    "outside": (plain, None, [(n,) for n in (*TRACED, 12, 2, 11)], {11}),
    "window": (plain, lambda x: x[:, -6:], [(n,) for n in (*TRACED, 5, 8)], set()),
    "longer than the window": (plain, lambda x: x[:, -3:], [(n,) for n in (2, *TRACED, 5, 8)], {8}),
    "every other": (plain, lambda x: x[:, ::2], [(n,) for n in (4, 16, 6, 8, 10, 12, 7, 14)], {12}),
    "positions": (with_positions, None, [(n,) for n in (*TRACED, 5, 8)], {5, 8}),
    "carried": (carried, None, [(n,) for n in (*TRACED, 5, 8)], {5, 8}),
    "masked": (
        masked,
        None,
        [
            *((n, 3, True) for n in TRACED),
            *((n, 3, False) for n in TRACED),
            *((5, 3, False), (5, 3, True), (8, 3, True), (8, 3, False)),
        ],
        {5, 8},
    ),
    "mask made anew": (masked_anew, None, [(n,) for n in (*TRACED, 5, 8)], set()),
    "two lengths": (across, None, [*PAIRS, (6, 6), (7, 5), (20, 5)], {6, 7}),
}


@pytest.mark.parametrize(("name", "pipeline"), pairs([*STEPS], [("zb_h1", 2), ("1f1b", 2)]))
def test_lengths_between_traced_ones_are_derived_and_exact(name, pipeline):
    step, cut, given, lengths = STEPS[name]
    module = module_of(step, cut) if cut else module_of(step)
    found, _ = compare_with_plain(module, *pipeline, [batch_of(*each) for each in given], 2)
    assert {length[0] for length in derived_in(found)} == lengths
    traced = InProcessPipeline(module, build(pipeline[0], 2, 2), call_step, derive_lengths=False)
    for each in given:
        if each[0] in lengths:
            traced.run(batch_of(*each), 2)
    others = found.ranks[0].records.by_key
    for key, record in traced.ranks[0].records.by_key.items():
        assert sizes_of(others[key]) == sizes_of(record)


def traced(module, parts, **options):
    """Return the records of parts, as each comes."""
    (rank,) = InProcessPipeline(module, build("1f1b", 1, 2), call_step, **options).ranks
    split_into_microbatches(
        rank, parts[0], len(parts[0]["x"]), partial(run, rank.module), "train", 0
    )
    return [rank.records.find_or_trace("train", part, partial(run, rank.module)) for part in parts]


def run(module, part, call):
    return call_step(module, part)


def rows(module, batch):
    x = module.embed(batch["x"])
    for block in module.blocks:
        x = block(x)
    return x


def test_results_with_a_row_for_each_sample_may_have_other_numbers_of_them():
    parts = [{k: v[:size] for k, v in batch_of(5).items()} for size in (4, 2, 3)]
    with torch.no_grad():
        found = traced(module_of(rows), parts)
    assert [record.result_counts for record in found] == [{4}, {2}, {3}]


def special(module, batch):
    x = module.embed(batch["x"])
    for block in module.blocks:
        x = block(x[:, :3] if x.shape[1] == 5 else x)
    return loss_of(module, x)


def with_early(module, batch):
    """Uses what the first block computes at one length only, where nothing else gets a gradient."""
    x = early = module.blocks[0](module.embed(batch["x"]))
    for block in module.blocks[1:]:
        x = block(x.detach() if x.shape[1] == 5 else x)
    return loss_of(module, x + early if x.shape[1] == 5 else x)


@pytest.mark.parametrize("step", [special, with_early])
def test_a_length_that_is_treated_differently_between_blocks_is_traced(step):
    batches = [batch_of(length) for length in (*TRACED, 8, 5, 5, 8)]
    found, _ = compare_with_plain(module_of(step), "zb_h1", 2, batches, 2)
    assert {length[0] for length in derived_in(found)} == {8}


def test_a_length_that_a_block_treats_differently_is_refused_by_name():
    module = module_of(plain, lambda x: x[:, :3] if x.shape[1] == 5 else x)
    batches = [batch_of(length) for length in (*TRACED, 8, 5)]
    refused = r"(?s)blocks.1 returned .* a block treats lengths \[5, 4,.* set derive_lengths=False"
    with pytest.raises(RuntimeError, match=refused):
        compare_with_plain(module, "zb_h1", 2, batches, 2)
    compare_with_plain(module, "zb_h1", 2, batches, 2, derive_lengths=False)


def test_shapes_that_exceed_none_that_ran_are_not_new():
    pipeline = InProcessPipeline(module_of(plain), build("1f1b", 2, 2), call_step)
    news = []
    for length in (6, 9, 4, 9, 8, 12, 11):
        pipeline.run(batch_of(length), 2)
        first, other = (rank.microbatches[0] for rank in pipeline.executors)
        assert first.is_new == other.is_new
        news.append(first.is_new)
    assert news == [True, True, False, False, False, True, False]


def test_a_family_needs_each_record_of_its_base_to_be_checked():
    """A second length that few had is taken for no function of what all others show."""
    pipeline = InProcessPipeline(module_of(across), build("1f1b", 2, 2), call_step)
    for length in (3, 9, 4, 6, 7, 10):
        pipeline.run(batch_of(length, 5), 2)
    pipeline.run(batch_of(3, 7), 2)
    pipeline.run(batch_of(9, 7), 2)
    pipeline.run(batch_of(5, 7), 2)  # lies between, but nothing has shown what the 7 does
    assert not pipeline.executors[0].microbatches[0].record.is_derived
    pipeline.run(batch_of(8, 5), 2)
    assert pipeline.executors[0].microbatches[0].record.is_derived


def test_a_record_of_the_same_lengths_checks_nothing():
    module = Regression([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    pipeline = InProcessPipeline(module, build("1f1b", 2, 2), call_step)
    family = RecordFamily()
    for length in (3, 5, 9, 9, 5, 3):
        pipeline.run(torch.randn(4, length, WIDTH), 2)
        family.add((length,), pipeline.executors[0].microbatches[0].record)
    assert family.derive((4,)) is None

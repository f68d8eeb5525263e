import itertools
import random

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.partition import SegmentCosts, cut
from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.schedule import build
from tests.support.small_modules import (
    DemoGPT,
    Regression,
    call_step,
    linear_blocks,
    run_pipeline,
    tokens,
)


def chain_of(count):
    return BlockChain("blocks", {f"blocks.{i}": nn.Identity() for i in range(count)})


def costs_of(*forward):
    """Costs of blocks and, last, of what follows them."""
    zeros = (0.0,) * len(forward)
    return SegmentCosts(tuple(forward), zeros, zeros, (0,) * len(forward))


def counts_of(stages):
    return [len(stage.blocks) for stage in stages]


def heaviest(costs, counts):
    ends = list(itertools.accumulate(counts))
    loads = [sum(costs[end - n : end]) for n, end in zip(counts, ends, strict=True)]
    return max([*loads[:-1], loads[-1] + costs[-1]])


def all_counts(num_blocks, num_stages):
    for cuts in itertools.combinations(range(1, num_blocks), num_stages - 1):
        yield [b - a for a, b in itertools.pairwise((0, *cuts, num_blocks))]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_no_other_cut_has_a_lighter_heaviest_stage(num_stages):
    draw = random.Random(num_stages)
    for _ in range(20):
        forward = [float(draw.randint(1, 20)) for _ in range(8)]
        found = counts_of(cut(chain_of(7), costs_of(*forward), range(num_stages)))
        best = min(heaviest(forward, counts) for counts in all_counts(7, num_stages))
        assert heaviest(forward, found) == best, forward


def test_a_heavy_head_and_embedding_get_fewer_blocks():
    assert counts_of(cut(chain_of(8), costs_of(3, 1, 1, 1, 1, 1, 1, 1, 2), range(3))) == [2, 4, 2]


def test_equal_blocks_are_spread_evenly():
    assert counts_of(cut(chain_of(8), costs_of(*[1] * 8, 0), range(4))) == [2, 2, 2, 2]


def test_parameters_decide_where_nothing_is_known_of_time():
    zeros = (0.0,) * 5
    costs = SegmentCosts(zeros, zeros, zeros, (5, 1, 1, 1, 1))
    assert counts_of(cut(chain_of(4), costs, range(2))) == [1, 3]


@pytest.mark.parametrize(("num_stages", "counts"), [(1, [7]), (2, [4, 3]), (3, [3, 2, 2])])
def test_an_even_cut(num_stages, counts):
    assert (
        counts_of(cut(chain_of(7), costs_of(*[9, *[1] * 7]), range(num_stages), "even")) == counts
    )


def test_the_busiest_rank_is_relieved_where_ranks_have_several_stages():
    in_a_v = [0, 1, 1, 0]
    costs = costs_of(
        *[1] * 6, 0.2
    )  # [1, 2, 2, 1] has stages as light, but gives rank 1 four blocks
    counts = counts_of(cut(chain_of(6), costs, in_a_v))
    assert counts[1] + counts[2] == 3
    assert max(counts) == 2


def test_a_given_cut():
    stages = cut(chain_of(4), costs_of(*[1] * 5), range(2), [3, 1])
    assert [list(stage.blocks) for stage in stages] == [[0, 1, 2], [3]]
    assert [stage.segments for stage in stages] == [{0, 1, 2}, {3, 4}]


BAD_SPLITS = {
    (3, 2): r"split=\[3, 2\] must have 2 entries .* add up to 4 blocks; its 2 entries add up to 5",
    (4,): r"split=\[4\] must have 2 entries .* its 1 entries add up to 4",
    (4, 0): r"split=\[4, 0\] must have 2 entries of at least 1",
}


@pytest.mark.parametrize(("split", "message"), BAD_SPLITS.items(), ids=str)
def test_a_split_that_does_not_add_up_is_refused(split, message):
    with pytest.raises(ValueError, match=message):
        cut(chain_of(4), costs_of(*[1] * 5), range(2), split)


def test_fewer_blocks_than_stages_are_refused():
    with pytest.raises(
        ValueError,
        match="^blocks has 2 blocks for 4 stages; use fewer devices or "
        "num_chunks, or a model of at least 4 blocks$",
    ):
        cut(chain_of(2), costs_of(1, 1, 1), range(4))


@pytest.mark.parametrize("options", [{"split": [3, 2]}, {"blocks": "embed"}])
def test_a_pipeline_refuses_at_once(options):
    with pytest.raises(ValueError, match=r"split=\[3, 2\]|blocks='embed'"):
        InProcessPipeline(Regression(linear_blocks(4)), build("1f1b", 2, 2), call_step, **options)


def test_a_large_chain_is_cut_in_no_time():
    counts = counts_of(cut(chain_of(200), costs_of(*[1] * 200, 3), range(64)))
    assert sum(counts) == 200
    assert set(counts[:-1]) <= {3, 4}


# Costs of a real model


@pytest.fixture
def cut_gpt():
    pipeline = InProcessPipeline(DemoGPT(depth=4), build("1f1b", 2, 2), call_step)
    pipeline.run(tokens(2), 1)
    return pipeline.ranks[0]


def test_costs_are_in_units_of_an_average_block(cut_gpt):
    assert sum(cut_gpt.costs.forward) == pytest.approx(4 + head_share(cut_gpt))


def head_share(rank):
    width, vocabulary, time = 8, 16, 6
    block = 2 * time * 12 * width**2 + 2 * 2 * time**2 * width
    return 2 * time * width * vocabulary / block


def test_parameters_of_stages_add_up_to_the_models(cut_gpt):
    assert sum(cut_gpt.num_parameters) == sum(p.numel() for p in DemoGPT(depth=4).parameters())


def test_every_name_has_an_owner(cut_gpt):
    assert all(cut_gpt.ownership.owners.values())


def test_unused_parameters_stay_where_they_were_registered():
    class Unused(Regression):
        def __init__(self):
            super().__init__(linear_blocks(2))
            self.behind = nn.Linear(1, 1)

        def step(self, x):
            for block in self.blocks:
                x = block(x)
            return x.sum()

    pipeline = InProcessPipeline(Unused(), build("1f1b", 2, 2), call_step)
    pipeline.run(torch.ones(2, 4), 1)
    owners = pipeline.ranks[0].ownership.owners
    assert (owners["embed.weight"], owners["behind.weight"]) == ({0}, {1})


def test_a_split_of_a_run():
    found = run_pipeline(
        Regression(linear_blocks(4)), build("1f1b", 2, 2), torch.ones(2, 4), 1, split=[1, 3]
    )
    assert len(found.losses) == 2

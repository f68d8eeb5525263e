"""Where the chain of blocks is found, and where it is cut."""

import copy
import io
import itertools
import pickle
import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.cut import (
    BlockChain,
    SegmentCosts,
    StageMemoryLimits,
    cut,
    find_chain,
    format_blocks_argument,
)
from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.small_modules import (
    MODELS,
    DemoGPT,
    Regression,
    call_step,
    linear_blocks,
    tokens,
)

NAMES = {
    "gpt": "gpt.blocks",
    "mlp": "net",
    "llama": "model.model.layers",
    "gpt2": "model.transformer.h",
}


@pytest.mark.parametrize(("model", "name"), NAMES.items())
def test_the_chain_is_found(model, name):
    assert find_chain(MODELS[model].make()).name == name


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(linear_blocks(3))
        self.decoder = nn.ModuleList(linear_blocks(3))
        self.single = nn.Sequential(nn.Linear(50, 50))


class Outer(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net


def compiled_in_place():
    net = Regression(linear_blocks(2))
    net.compile(backend="eager")
    return net


PATTERNS = {
    "decoder": ["decoder.0", "decoder.1", "decoder.2"],
    ("encoder.*", "decoder.*"): [
        f"{name}.{i}" for name in ("encoder", "decoder") for i in range(3)
    ],
    ("decoder.1", "encoder.*"): ["decoder.1", "encoder.0", "encoder.1", "encoder.2"],
    ("*coder",): ["encoder", "decoder"],
}


@pytest.mark.parametrize(("blocks", "names"), PATTERNS.items())
def test_the_chain_may_be_named(blocks, names):
    chain = find_chain(Two(), blocks)
    assert [chain.block_name(index) for index in range(len(chain))] == names
    assert chain.enclosing_block(f"{names[1]}.weight") == 1
    assert chain.enclosing_block("single.0.weight") is None


def test_nested_and_compiled_blocks_are_a_chain():
    nested = [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(3)]
    assert find_chain(nn.Sequential(nn.Sequential(*nested))).name == "0"
    compiled = [torch.compile(block) for block in linear_blocks(2)]
    assert find_chain(Regression(compiled)).name == "blocks"
    shared = [nn.Sequential(nn.Linear(4, 4))]  # as ALBERT's layer, which has its group alone
    assert find_chain(Regression(shared)).name == "blocks"


def test_children_of_a_module_are_named_by_a_pattern():
    module = Outer(Regression(linear_blocks(2)))
    assert format_blocks_argument(module, ["net.blocks.0", "net.blocks.1"]) == 'blocks="net.blocks"'
    assert (
        format_blocks_argument(module, ["net.embed", "net.blocks", "net.head"])
        == 'blocks=["net.*"]'
    )


def test_a_dict_is_the_chain_where_there_is_no_list():
    module = Regression(linear_blocks(2))
    module.blocks = nn.ModuleDict(zip("ba", module.blocks, strict=True))
    assert find_chain(module).names == ["blocks.b", "blocks.a"]


NO_CHAIN = (
    "found no ModuleList or Sequential of blocks with parameters in {}; a pipeline is cut between "
    "its entries, so keep the model's layers in one and call them once each and in order"
)
COMPILED = (
    "net is compiled as a whole and contains the blocks {}; a stage runs only its own blocks, so "
    "compile the blocks instead, block.compile() for each"
)
REFUSED = [
    (
        Two,
        None,
        "encoder, decoder could each be the chain of blocks; name the blocks that the step",
    ),
    (Two, "encodr", "blocks='encodr' is not .* encoder, decoder, single"),
    (Two, "encodr", "did you mean 'encoder'"),
    (Two, "encoder.0", "blocks='encoder.0' is not .* encoder, decoder, single"),
    (Two, "", "blocks='' is not .* encoder, decoder, single"),
    (Two, ("encoder.*", "decodr.*"), "no module is called 'decodr.*'; .* there are encoder, decod"),
    (Two, ("encoder", "encoder.*"), "finds encoder.0 inside of encoder; each has to be a block of"),
    (lambda: nn.Linear(2, 2), None, NO_CHAIN.format("Linear")),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), None, NO_CHAIN.format("Sequential")),
    (
        lambda: Outer(torch.compile(Regression(linear_blocks(2)))),
        None,
        COMPILED.format("net._orig_mod.blocks"),
    ),
    (lambda: Outer(compiled_in_place()), None, COMPILED.format("net.blocks")),
]


@pytest.mark.parametrize(("make", "blocks", "message"), REFUSED)
def test_what_is_no_chain_is_refused(make, blocks, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        find_chain(make(), blocks)


def by_torch_save(block):
    file = io.BytesIO()
    torch.save(block, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def by_pickle(block):
    return pickle.loads(pickle.dumps(block))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, by_torch_save, by_pickle])
def test_a_copy_of_an_intercepted_block_is_plain(duplicate):
    chain = find_chain(Regression(linear_blocks(3)))
    before = repr(chain.blocks[0])
    chain.intercept()
    assert repr(chain.blocks[0]) == before
    found = duplicate(chain.blocks[0])
    assert type(found) is nn.Linear
    torch.testing.assert_close(found.state_dict(), chain.blocks[0].state_dict())


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
    for cuts in itertools.combinations(range(1, num_blocks + 1), num_stages - 1):
        yield [b - a for a, b in itertools.pairwise((0, *cuts, num_blocks))]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_no_other_cut_has_a_lighter_heaviest_stage(num_stages):
    draw = random.Random(num_stages)
    for _ in range(20):
        forward = [float(draw.randint(1, 20)) for _ in range(8)]
        found = counts_of(cut(chain_of(7), costs_of(*forward), range(num_stages)))
        best = min(heaviest(forward, counts) for counts in all_counts(7, num_stages))
        # The head is alone where that is worth it.
        assert heaviest(forward, found) <= best * 1.03, forward


CUTS = {
    "a heavy head and embedding": ((3, 1, 1, 1, 1, 1, 1, 1, 2), range(3), "auto", [2, 4, 2]),
    "equal blocks": ((*[1] * 8, 0), range(4), "auto", [2, 2, 2, 2]),
    # [1, 2, 2, 1] has stages as light, but gives rank 1 four blocks.
    "the busiest rank of a V": ((*[1] * 6, 0.2), [0, 1, 1, 0], "auto", [2, 2, 1, 1]),
    "a head that is worth a stage": ((*[1] * 28, 3.9), range(8), "auto", [*[4] * 7, 0]),
    "a head that is not": ((*[1] * 8, 1), range(4), "auto", [3, 2, 2, 1]),
    "a head on a V": ((*[1] * 6, 2), [0, 1, 1, 0], "auto", [1, 3, 1, 1]),
    "a head alone": ([1] * 5, range(3), [3, 1, 0], [3, 1, 0]),
    "one even stage": ((9, *[1] * 7), range(1), "even", [7]),
    "two even stages": ((9, *[1] * 7), range(2), "even", [4, 3]),
    "three even stages": ((9, *[1] * 7), range(3), "even", [3, 2, 2]),
    "as given": ([1] * 5, range(2), [3, 1], [3, 1]),
}


@pytest.mark.parametrize(("costs", "ranks", "split", "counts"), CUTS.values(), ids=CUTS)
def test_cuts(costs, ranks, split, counts):
    stages = cut(chain_of(len(costs) - 1), costs_of(*costs), ranks, split)
    assert counts_of(stages) == counts
    assert [i for stage in stages for i in stage.blocks] == [*range(len(costs) - 1)]
    assert stages[-1].segments == {*stages[-1].blocks, len(costs) - 1}


@pytest.mark.parametrize(
    ("options", "ranks", "counts"),
    [
        ({"impossible": {4}}, range(2), [5, 3]),
        ({"impossible": {2, 6}}, range(4), [3, 2, 2, 1]),
        ({"impossible": {1, 3, 7}}, [0, 1, 1, 0], [2, 2, 2, 2]),
        ({"impossible": {*range(1, 8)}}, range(4), [2, 2, 2, 2]),
        ({"impossible": {8}, "forward": (*[1] * 8, 3)}, range(4), [3, 2, 2, 1]),
        ({"sent": dict.fromkeys(range(1, 8), 8) | {3: 4, 6: 4}}, range(3), [3, 3, 2]),
        ({"sent": dict.fromkeys(range(1, 8), 8) | {1: 4}}, range(2), [4, 4]),
        ({"sent": dict.fromkeys(range(1, 8), 4096) | {1: 0}}, range(2), [4, 4]),
    ],
)
def test_impossible_cuts_are_avoided_and_equal_ones_send_least(options, ranks, counts):
    costs = replace(costs_of(*[1] * 8, 0), **options)
    assert counts_of(cut(chain_of(8), costs, ranks)) == counts


def test_parameters_decide_where_nothing_is_known_of_time():
    zeros = (0.0,) * 5
    costs = SegmentCosts(zeros, zeros, zeros, (5, 1, 1, 1, 1))
    assert counts_of(cut(chain_of(4), costs, range(2))) == [1, 3]


UNLIKE = {
    "the second half as fast": ([1] * 6, range(2), (1.0, 2.0), [4, 2]),
    "the first half as fast": ([1] * 6, range(2), (2.0, 1.0), [2, 4]),
    "four cards": ([1] * 16, range(4), (1.0, 1.5, 2.0, 3.0), [7, 4, 3, 2]),
    "two stages each": ([1] * 6, [0, 1, 1, 0], (1.0, 2.0, 2.0, 1.0), [2, 1, 1, 2]),
    "alike": ([1] * 6, range(2), (1.0, 1.0), [3, 3]),
}


@pytest.mark.parametrize(("costs", "ranks", "slowness", "counts"), UNLIKE.values(), ids=UNLIKE)
def test_a_slow_rank_has_fewer_blocks(costs, ranks, slowness, counts):
    chain, costs = chain_of(len(costs)), costs_of(*costs, 0)
    assert counts_of(cut(chain, costs, ranks, "auto", slowness)) == counts


@pytest.mark.parametrize(
    ("ranks", "limits", "more", "counts"),
    [
        (range(2), (8, 2), (), [6, 2]),
        (range(2), (3, 8), (), [3, 5]),
        (range(2), (9, 5), ([3, 1], [0] * 9), [3, 5]),
        (range(2), (8, 8), ([1, 1], [1] * 4 + [0] * 5), [4, 4]),
        (range(2), (6, 8), ([1, 1], [1] * 4 + [0] * 5), [3, 5]),
        ([0, 1, 1, 0], (4, 1, 1, 4), (), [3, 1, 1, 3]),
        (range(2), (3, 3), (), [4, 4]),  # nothing fits
    ],
)
def test_stages_have_no_more_than_there_is_room_for(ranks, limits, more, counts):
    memory = StageMemoryLimits([1] * 8 + [0], limits, *more)
    assert counts_of(cut(chain_of(8), costs_of(*[1] * 8, 0), ranks, memory_limits=memory)) == counts


REFUSED = [
    ([3, 2], 2, r"split=\[3, 2\] must have 2 entries .* add up to 4 .*; its 2 entries add up to 5"),
    ([4], 2, r"split=\[4\] must have 2 entries .* its 1 entries add up to 4"),
    ([0, 4], 2, r"split=\[0, 4\] must have 2 entries of at least 1"),
    ([4, 0, 0], 3, r"split=\[4, 0, 0\] must have 3 entries of at least 1"),
    ("auto", 8, "^blocks has 4 blocks for 8 stages; use fewer devices or num_chunks, or a model of "
     "at least 8 blocks$"),
]  # fmt: skip


@pytest.mark.parametrize(("split", "num_stages", "message"), REFUSED)
def test_a_cut_that_does_not_add_up_is_refused(split, num_stages, message):
    with pytest.raises(ValueError, match=message):
        cut(chain_of(4), costs_of(*[1] * 5), range(num_stages), split)


@pytest.mark.parametrize("options", [{"split": [3, 2]}, {"blocks": "embed"}])
def test_a_pipeline_refuses_at_once(options):
    with pytest.raises(ValueError, match=r"split=\[3, 2\]|blocks='embed'"):
        InProcessPipeline(Regression(linear_blocks(4)), build("1f1b", 2, 2), call_step, **options)


# Costs of a real model


def test_costs_are_in_units_of_an_average_block_and_parameters_add_up_to_the_models():
    module = DemoGPT(depth=4)
    pipeline = InProcessPipeline(module, build("1f1b", 2, 2), call_step)
    pipeline.run(tokens(2), 1)
    rank, width, vocabulary, time = pipeline.ranks[0], 8, 16, 6
    pairs = time * (time + 1) // 2  # of a query and a key that it sees
    block = 2 * time * 12 * width**2 + 2 * 2 * pairs * width
    assert sum(rank.cut.costs.forward) == pytest.approx(4 + 2 * time * width * vocabulary / block)
    assert sum(rank.cut.num_parameters) == sum(p.numel() for p in module.parameters())


def test_unused_parameters_stay_where_they_were_registered():
    class Unused(Regression):
        def __init__(self):
            super().__init__(linear_blocks(2))
            self.after = nn.Linear(1, 1)

        def step(self, x):
            for block in self.blocks:
                x = block(x)
            return x.sum()

    pipeline = InProcessPipeline(Unused(), build("1f1b", 2, 2), call_step)
    pipeline.run(torch.ones(2, 4), 1)
    owners = pipeline.ranks[0].tensors.owners
    assert (owners["embed.weight"], owners["after.weight"]) == ({0}, {1})

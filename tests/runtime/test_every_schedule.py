"""Every schedule gives the plain module's losses and gradients, and all of them the same bits."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_pipeoffload.schedule import SCHEDULES, Costs, Kind, build, offload_activations
from tests.support.offloaded import memory_of_all
from tests.support.pairs import by_shape, first, pairs, slow
from tests.support.small_modules import (
    MODELS,
    assert_same,
    linear_blocks,
    run_pipeline,
    run_plain,
)


@cache
def plain(name, num_microbatches, size=1):
    torch.manual_seed(0)
    module, batch = MODELS[name].make().double(), MODELS[name].batch(num_microbatches * size)
    return module, batch, run_plain(module, batch, size)


def assert_exact(name, num_ranks, model, count, size=1):
    module, batch, expected = plain(model, count, size)
    found = run_pipeline(module, build(name, num_ranks, count), batch, size)
    assert_same(found, expected)
    torch.testing.assert_close(found.buffers, expected.buffers)


@pytest.mark.parametrize("name", by_shape(SCHEDULES))
def test_gradients_over_two_ranks_are_the_plain_modules(name):
    assert_exact(name, 2, "gpt_tied", 4)


@pytest.mark.parametrize("name", ["v", *map(slow, ["zb", "zb_v", "grouped", "po_h"])])
def test_gradients_over_four_ranks_are_the_plain_modules(name):
    assert_exact(name, 4, "mlp", 8)


SIZES = [("interleaved_1f1b", 2), ("zb_v", 2), ("1f1b", 4), ("zb_h1", 1)]


@pytest.mark.parametrize(("model", "size"), first(4, pairs([*MODELS], SIZES)))
def test_gradients_of_every_model_are_the_plain_modules(model, size):
    assert_exact(*size, model, 4, size=2)


# The same bits: a weight of several stages or uses adds up in a fixed order


NAMES = [name for name in SCHEDULES if name != "optpipe"]
COSTS = Costs(1, 1, 1, weight_residue=0.5, offload=0.5, reload=0.5)


class Tied(nn.Module):
    """The table is the head too; the penalty gives another weight a gradient that no W computes."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.blocks = nn.ModuleList(linear_blocks(8, 8))
        self.neck = nn.Linear(8, 8)

    def step(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x).tanh()
        logits = self.neck(x) @ self.table.weight.T
        return functional.cross_entropy(logits, tokens) + self.neck.weight.pow(4).sum()


@cache
def tied():
    torch.manual_seed(0)
    return Tied(), torch.randint(8, (24,))


def run(schedule, **options):
    module, batch = tied()
    return run_pipeline(module, schedule, batch, 2, **options)


@cache
def one_stage_a_rank():
    return run(build("gpipe", 2, 12))


def assert_same_bits(found, expected):
    assert all(map(torch.equal, found.losses, expected.losses))
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_stage_runs_its_backwards_and_weights_in_the_order_of_microbatches(num_ranks):
    for schedule in (build(name, num_ranks, 2 * num_ranks) for name in NAMES):
        for actions in schedule:
            for kinds in ({Kind.B, Kind.BW}, {Kind.W, Kind.BW}):
                for stage in {action.stage for action in actions}:
                    order = [a.microbatch for a in actions if a.stage == stage and a.kind in kinds]
                    assert order == sorted(order), schedule.name


@pytest.mark.parametrize("num_ranks", [2, 3, slow(4)])
@pytest.mark.parametrize("name", by_shape(NAMES))
def test_every_schedule_has_the_same_bits(name, num_ranks):
    assert_same_bits(run(build(name, num_ranks, 12)), one_stage_a_rank())


@pytest.mark.parametrize(("name", "limit"), [("zb", 2), ("zb_v", 3), ("v", 3)])
def test_limits_and_offload_change_no_bit(name, limit):
    limited = build(name, 2, 12, costs=COSTS, memory_limit=limit)
    assert_same_bits(run(limited), one_stage_a_rank())
    plan, _ = offload_activations(build(name, 2, 12), COSTS, "full")
    assert_same_bits(run(plan, memory=memory_of_all), one_stage_a_rank())


def test_one_stage_that_has_both_uses_adds_them_up_by_microbatch():
    assert_same_bits(run(build("zb_h2", 1, 12)), run(build("gpipe", 1, 12)))

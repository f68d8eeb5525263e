"""Towers, teachers and references without gradients are blocks as others, with F only."""

import itertools

import pytest
import torch
from torch import nn

from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.pairs import some
from tests.support.small_modules import (
    Outcome,
    assert_same,
    call_step,
    linear_blocks,
    loss_of,
    run_plain,
    through,
)


class Frozen(nn.Module):
    """A step over an embedding, trained blocks, others without gradients, and a head."""

    def __init__(self, function, mode=torch.no_grad):
        super().__init__()
        self.function, self.mode = function, mode
        self.embed = nn.Linear(4, 4)
        self.trained = nn.ModuleList(linear_blocks(4))
        self.others = nn.ModuleList(linear_blocks(4))
        self.head = nn.Linear(4, 1)

    def step(self, x):
        return self.function(self, x)


def tower_below(m, x):
    with m.mode():
        x = through(m.others, m.embed(x))
    return loss_of(m, through(m.trained, x.clone()))


def teacher_after(m, x):
    logits = m.head(through(m.trained, m.embed(x)))
    with m.mode():
        wanted = through(m.others, x)
    return (logits - wanted.sum(-1, keepdim=True).clone()).pow(2).mean()


def reference_between(m, x):
    x = through(m.trained[:2], m.embed(x))
    with m.mode():
        reference = through(m.others, 2 * x)
    return loss_of(m, through(m.trained[2:], x) + reference.clone())


def without_no_grad(m, x):
    m.others.requires_grad_(False)
    return loss_of(m, through(m.trained, through(m.others, x)))


def adapters_below(m, x):
    m.others.requires_grad_(False)
    return loss_of(m, through(m.others, through(m.trained, x)))


STEPS = [tower_below, teacher_after, reference_between, without_no_grad, adapters_below]
PLANS = [("zb_h1", 2), ("zb_v", 2), ("1f1b", 3), ("zb_h1", 8), ("1f1b", 1)]
ROWS = [*itertools.product(STEPS, PLANS, ["none", "full"], [torch.no_grad, torch.inference_mode])]


@pytest.mark.parametrize(("step", "plan", "recompute", "mode"), some(ROWS, 7))
def test_parts_without_gradients_train_as_on_one_device(step, plan, recompute, mode):
    module, batch = Frozen(step, mode).double(), torch.randn(4, 4).double()
    schedule = build(*plan, 4)
    pipeline = InProcessPipeline(module, schedule, call_step, recompute=recompute)
    outcome = Outcome(pipeline.run(batch, 1), pipeline.named_gradients())
    assert_same(outcome, run_plain(module, batch, 1))
    assert len(pipeline.ranks[0].chain) == 8


def test_they_cost_no_backward():
    pipeline = InProcessPipeline(Frozen(tower_below), build("zb_h1", 8, 8), call_step, split="even")
    pipeline.run(torch.randn(8, 4), 1)
    costs = pipeline.ranks[0].cut.costs
    assert costs.forward[1:4] == (costs.forward[1],) * 3
    assert costs.backward_input[:4] == costs.backward_weight[:4] == (0,) * 4
    assert min(costs.backward_weight[4:]) > 0


def test_memory_is_measured_anew_where_other_parameters_train():
    pipeline = InProcessPipeline(Frozen(without_freezing), build("zb_h1", 2, 2), call_step)
    for rank in pipeline.ranks:
        rank.module.embed.requires_grad_(False)
        rank.module.trained.requires_grad_(False)
    batch = torch.randn(2, 4096, 4)

    def peak():
        pipeline.run(batch, 1)
        return pipeline.executors[0].memory.ledger.peak_device_bytes

    assert peak() == 0
    for rank in pipeline.ranks:
        rank.module.requires_grad_(True)
    assert peak() > 0


def without_freezing(m, x):
    return loss_of(m, through(m.trained, m.embed(x)))

"""What travels between blocks, what is frozen, what a stage refuses: always against plain."""

import random
from collections import namedtuple
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.small_modules import (
    Classifier,
    Regression,
    Step,
    assert_exact,
    assert_same,
    call_step,
    compare_with_plain,
    linear_blocks,
    loss_of,
    run_pipeline,
    through,
    vectors,
)

Pair = namedtuple("Pair", ["x", "kept"])


class Block(nn.Module):
    """Maps what came before to the next payload."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, *payload):
        return self.function(self.linear, *payload)


class Passing(Regression):
    """Hands a payload of any kind from block to block; ``last`` makes a tensor of it again."""

    def __init__(self, function, first, last):
        super().__init__([Block(function) for _ in range(4)])
        self.first, self.last = first, last

    def forward(self, x):
        payload = self.first(self.embed(x))
        for block in self.blocks:
            payload = block(payload)
        return self.head(self.last(payload))


def row(linear, payload):
    x, count, nothing, index, mask, fixed = payload
    x = torch.where(mask, linear(x), x) + fixed[index].sum()
    return x, count + 1, nothing, index.flip(0), ~mask, fixed * 2


PAYLOADS = {
    "tuple with ints, None, int, bool and constant tensors": (
        row,
        lambda x: (x, 3, None, torch.arange(3), torch.tensor([1, 1, 0, 1]) > 0, x.new_ones(3, 4)),
        lambda payload: payload[0] * payload[1] + payload[5].sum(),
    ),
    "dict": (
        lambda linear, p: {"x": linear(p["x"]), "skip": p["skip"].sin(), "name": p["name"]},
        lambda x: {"x": x, "skip": x, "name": "a"},
        lambda p: p["x"] * p["skip"],
    ),
    "namedtuple": (
        lambda linear, p: Pair(linear(p.x), p.kept),
        lambda x: Pair(x, x.exp()),
        lambda p: p.x + p.kept,
    ),
    "the same tensor twice": (
        lambda linear, p: [linear(p[0])] * 2,
        lambda x: [x, x],
        lambda p: p[0] * p[1],
    ),
    "a view and its base": (
        lambda linear, p: (y := linear(p[0]), y[:, :2]),
        lambda x: (x, x[:, :2]),
        lambda p: p[0] + p[1].sum(1, keepdim=True),
    ),
    "a value that nothing uses": (
        lambda linear, p: (linear(p[0]), linear(p[0]).exp()),
        lambda x: (x, x),
        lambda p: p[0],
    ),
    "a transposed tensor": (
        lambda linear, p: linear(p.t()).t(),
        lambda x: x.t(),
        lambda p: p.t(),
    ),
    "what blocks write in place": (
        lambda linear, x: linear(x.mul_(2)).add_(1), lambda x: x.clone(), lambda x: x
    ),
}  # fmt: skip


@pytest.mark.parametrize(("function", "first", "last"), PAYLOADS.values(), ids=PAYLOADS)
def test_payloads_of_any_kind(function, first, last):
    module = Passing(function, first, last).double()
    assert_exact(module, torch.randn(4, 4).double(), num_ranks=4)


def writes_between(m, x):
    """Write what blocks return, also where that is of another stage: each run finds it new."""
    x = m.embed(x)
    for block in m.blocks:
        x = block(x)
        assert not hasattr(x, "is_seen")
        x.is_seen = True
        x = x.add_(1).unsqueeze_(0).squeeze(0)
    return m.head(x).pow(2).mean()


def test_a_step_that_writes_what_blocks_return():
    assert_exact(Step(writes_between).double(), torch.randn(4, 4).double(), size=1, num_ranks=4)


class Scaled(nn.Linear):
    def forward(self, x, scale):
        return super().forward(x) * scale, scale + 1


def scaled(m, batch):
    x, scale = m.embed(batch["x"]), batch["scale"]
    for block in m.blocks:
        x, scale = block(x, scale)
    return m.head(x).pow(2).mean()


def test_numbers_in_the_payload_follow_the_batch():
    module = Step(scaled, [Scaled(4, 4) for _ in range(4)]).double()
    batches = [{"x": torch.randn(4, 4).double(), "scale": scale} for scale in (1, 2)]
    compare_with_plain(module, "1f1b", 2, batches)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 3), (0, 5), (3, 6)])
def test_frozen_layers(start, end):
    module = Regression(linear_blocks(4)).double()
    for layer in (module.embed, *module.blocks, module.head)[start:end]:
        layer.requires_grad_(False)
    assert_exact(module, torch.randn(4, 4).double(), num_ranks=4)


class Checkpointing(Regression):
    """Its step checkpoints the blocks, or not."""

    on = True

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.on else block(x)
        return self.head(x)


def test_recomputed_blocks_drop_the_same():
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)]
    module, x = Checkpointing(blocks).double(), torch.randn(4, 4).double()
    found = run_pipeline(module, build("zb_h1", 2, 2), x, 2, blocks="blocks")
    module.on = False
    assert_same(found, run_pipeline(module, build("zb_h1", 2, 2), x, 2, blocks="blocks"))


def test_a_detached_loss_is_refused():
    module, x = Step(lambda m, x: m(x).mean().detach()).double(), torch.randn(4, 4).double()
    with pytest.raises(ValueError, match="does not depend on any parameter that trains"):
        run_pipeline(module, build("zb_h1", 2, 2), x, 2)


# Dropout


class Stochastic(nn.Linear):
    """A block that is left out at random, or some of its rows."""

    def forward(self, x):
        if random.random() < 0.3:
            return x
        return x + super().forward(x) * torch.from_numpy(np.random.binomial(1, 0.5, (len(x), 1)))


class Later(nn.Linear):
    """A block that is left out at random, from some batch on."""

    def __init__(self, index):
        super().__init__(6, 6)
        nn.init.constant_(self.weight, 0.1 * index)
        nn.init.zeros_(self.bias)
        self.draws = False

    def forward(self, x):
        return x if self.draws and np.random.rand() < 0.5 else x + super().forward(x)


def dropping():
    layers = [layer for _ in range(4) for layer in (Stochastic(6, 6), nn.Dropout(0.2))]
    return Classifier(nn.Linear(6, 6), *layers, nn.Linear(6, 5)).double()


def test_dropout_does_not_depend_on_ranks_and_schedule():
    module, batch = dropping(), vectors(8)
    reference = run_pipeline(module, build("gpipe", 1, 4), batch, 2)
    for name, num_ranks in [("zb_h1", 1), ("zb_v", 2), ("interleaved_1f1b", 2), ("zb_h2", 4)]:
        found = run_pipeline(module, build(name, num_ranks, 4), batch, 2)
        assert found.losses == reference.losses
        assert_same(found, reference)


@pytest.mark.parametrize(("name", "num_ranks"), [("zb_h1", 2), ("zb_v", 2), ("zb_h2", 4)])
def test_draws_that_begin_after_the_trace_do_not_depend_on_ranks_either(name, num_ranks):
    def losses(name, num_ranks):
        pipeline = InProcessPipeline(module, build(name, num_ranks, 4), call_step)
        found = []
        for seed in range(4):
            if seed == 2:  # it is noticed in this batch
                for rank in pipeline.ranks:
                    for block in rank.module.net[1:-1]:
                        block.draws = True
            found.append([float(loss) for loss in pipeline.run(batch, 2, seed)])
        return found

    module = Classifier(nn.Linear(6, 6), *map(Later, range(8)), nn.Linear(6, 5)).double()
    batch = vectors(8)
    expected, found = losses("gpipe", 1), losses(name, num_ranks)
    assert found[0] == found[1] != found[3] == expected[3]


def test_dropout_depends_on_seed_and_microbatch():
    x = torch.randn(1, 6).double().expand(4, 6)
    batch = {"x": x, "y": torch.zeros(4, dtype=torch.int64)}
    pipeline = InProcessPipeline(dropping(), build("zb_h1", 2, 4), call_step)
    losses = [float(loss) for seed in (0, 1) for loss in pipeline.run(batch, 1, seed)]
    assert len(set(losses)) == 8


class Masked(Regression):
    """Draws in the step, before, between and after the blocks, from every generator."""

    def step(self, x):
        draws = [random.random(), np.random.rand(), torch.rand(()).item()]
        x = nn.functional.dropout(self.embed(nn.functional.dropout(x, 0.2)), 0.2)
        draws.append(torch.rand(()).item())
        x = x + sum(draws)
        for block in self.blocks:
            x = block(x) + torch.rand(())
        return (self.head(x) - sum(draws) - torch.rand(())).pow(2).mean()


def test_draws_of_the_step_are_the_same_on_every_stage():
    module, x = Masked(linear_blocks(4)).double(), torch.randn(4, 4).double()
    reference = run_pipeline(module, build("gpipe", 1, 2), x, 2)
    assert_same(run_pipeline(module, build("zb_h1", 4, 2), x, 2), reference)


def test_global_generators_are_left_as_found():
    module = Masked(linear_blocks(2))
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    run_pipeline(module, build("1f1b", 2, 2), torch.ones(2, 4), 1)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


# What a stage refuses while it runs


def test_a_payload_of_another_shape_is_refused():
    rows = [2]  # which the trace does not see
    module = Regression([Block(lambda linear, x: linear(x)[: rows[0]]), nn.Linear(4, 4)])
    pipeline = InProcessPipeline(module, build("1f1b", 2, 1), call_step)
    pipeline.run(torch.ones(2, 4), 2)
    rows[:] = [1]
    with pytest.raises(RuntimeError, match=r"blocks.0 returned .*\[1, 4\].* where .*\[2, 4\]"):
        pipeline.run(torch.ones(2, 4), 2)


def careful(m, x):
    try:
        return m(x).pow(2).mean()
    except Exception:
        return x.sum()


def test_except_exception_around_the_blocks_is_fine():
    assert_exact(Step(careful).double(), torch.randn(4, 4).double())


def finally_uses_the_loss(m, x):
    try:
        loss = loss_of(m, through(m.blocks, x))
    finally:
        loss.detach()
    return loss


def every_error_is_another(m, x):
    try:
        return loss_of(m, through(m.blocks, x))
    except BaseException as error:
        raise RuntimeError("the step failed") from error


@contextmanager
def noting(m):
    try:
        yield
    finally:
        m.note = m.hidden.mean().item()


def exit_uses_what_a_later_stage_makes(m, x):
    with noting(m):
        m.hidden = through(m.blocks, x)
    return loss_of(m, m.hidden)


@pytest.mark.parametrize(
    "step", [finally_uses_the_loss, every_error_is_another, exit_uses_what_a_later_stage_makes]
)
def test_an_error_of_code_that_runs_as_the_step_is_left_is_dropped(step):
    batches = [torch.randn(8, 4).double() for _ in range(2)]
    compare_with_plain(Step(step).double(), "zb_h1", 2, batches)

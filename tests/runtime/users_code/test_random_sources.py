"""Steps that draw from what their users have made draw what one device draws, or are refused."""

from __future__ import annotations

import copy
import functools
import itertools
import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.runtime.microbatch import split_batch
from lightning_pipeoffload.schedule import build, forward_only
from tests.support.small_modules import Regression, call_step, linear_blocks

PIPELINES = [("zb_v", 1), ("zb_v", 2), ("interleaved_1f1b", 2), ("zb_h1", 3)]


class Noisy(Regression):
    """Adds noise before its blocks which its loss takes away again, as a diffusion model does."""

    def __init__(self, draw):
        super().__init__(linear_blocks(6))
        self.draw = draw
        self.source = None

    def step(self, x):
        noise = self.draw(self, x)
        return (self(x + noise) - noise.mean()).pow(2).mean()


def run_both(module, make, schedule, num_ranks, num_steps=3, between=lambda module, step: None):
    """Run steps of 4 microbatches in a pipeline and on one device; compare losses, gradients."""
    module, x = module.double(), torch.randn(8, 4).double()
    plain = copy.deepcopy(module)
    pipeline = InProcessPipeline(module, build(schedule, num_ranks, 4), call_step)
    for copied in (plain, *(rank.module for rank in pipeline.ranks)):
        make(copied)
    for step in range(num_steps):
        for copied in (plain, *(rank.module for rank in pipeline.ranks)):
            between(copied, step)
        losses, expected = pipeline.run(x, 2), []
        for part in split_batch(x, 2):
            expected.append(call_step(plain, part))
            (expected[-1] / 4).backward()
        torch.testing.assert_close(losses, [loss.detach() for loss in expected], rtol=0, atol=1e-9)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(pipeline.named_gradients(), gradients)
    return pipeline


class Holder:
    def __init__(self, source):
        self.source = source


def lines(tmp_path):
    path = tmp_path / "numbers"
    path.write_text("".join(f"{index / 10}\n" for index in range(100)))
    return path


def from_torch(source, x):
    return torch.randn(x.shape, generator=source, dtype=x.dtype)


def from_numpy(source, x):
    return torch.from_numpy(source.normal(size=x.shape))


def from_next(source, x):
    return torch.as_tensor(next(source), dtype=x.dtype)


def counts(source, x):
    source += 1
    return x.new_tensor(source.sum())


def generate():
    for index in itertools.count():
        yield index / 7


SOURCES = {
    "torch.Generator": (lambda path: torch.Generator().manual_seed(1), from_torch),
    "numpy Generator": (lambda path: np.random.default_rng(1), from_numpy),
    "numpy BitGenerator": (
        lambda path: np.random.PCG64(1),
        lambda bits, x: x.new_tensor(np.random.Generator(bits).normal()),
    ),
    "RandomState": (lambda path: np.random.RandomState(1), from_numpy),
    "random.Random": (lambda path: random.Random(1), lambda g, x: x.new_tensor(g.random())),
    "Sobol": (
        lambda path: torch.quasirandom.SobolEngine(4, scramble=True, seed=1),
        lambda engine, x: engine.draw(len(x)).to(x.dtype),
    ),
    "iterator": (lambda path: iter([index / 10 for index in range(100)]), from_next),
    "generator": (lambda path: generate(), from_next),
    "count": (lambda path: itertools.count(1), from_next),
    "loader": (lambda path: iter(DataLoader(torch.arange(160.0).view(40, 4), 2)), from_next),
    "text": (lambda path: lines(path).open(), lambda file, x: x.new_tensor(float(next(file)))),
    "text by line": (
        lambda path: lines(path).open(),
        lambda file, x: x.new_tensor(float(file.readline())),
    ),
    "bytes": (
        lambda path: lines(path).open("rb"),
        lambda file, x: x.new_tensor(float(next(file))),
    ),
    "array": (lambda path: np.zeros(3), counts),
    "in containers": (
        lambda path: [{"g": random.Random(1)}],
        lambda source, x: x.new_tensor(source[0]["g"].random()),
    ),
    "in a tuple": (lambda path: (random.Random(1),), lambda s, x: x.new_tensor(s[0].random())),
    "in an object": (lambda path: Holder(generate()), lambda s, x: from_next(s.source, x)),
    "in a closure": (
        lambda path: (lambda gen: lambda: next(gen))(generate()),
        lambda call, x: x.new_tensor(call()),
    ),
    "in a partial": (
        lambda path: functools.partial(lambda rng: rng.random(), random.Random(1)),
        lambda call, x: x.new_tensor(call()),
    ),
    "a method": (
        lambda path: random.Random(1).random,
        lambda call, x: x.new_tensor(call()),
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_microbatch_draws_once(name, tmp_path):
    make, draw = SOURCES[name]
    schedule, num_ranks = PIPELINES[list(SOURCES).index(name) % 3]
    run_both(
        Noisy(lambda module, x: draw(module.source, x)),
        lambda module: setattr(module, "source", make(tmp_path)),
        schedule,
        num_ranks,
    )


@pytest.mark.parametrize(("schedule", "num_ranks"), PIPELINES)
def test_generators_of_torch_are_in_step_in_every_schedule(schedule, num_ranks):
    make, draw = SOURCES["torch.Generator"]
    run_both(
        Noisy(lambda module, x: draw(module.source, x)),
        lambda module: setattr(module, "source", make(None)),
        schedule,
        num_ranks,
    )


def makes_its_own(module, x):
    if module.source is None:
        module.source = torch.Generator().manual_seed(3)
    return from_torch(module.source, x)


def makes_an_attribute(module, x):
    if not hasattr(module, "noise"):
        module.noise = torch.Generator().manual_seed(3)
    return from_torch(module.noise, x)


def starts_over(module, x):
    try:
        return from_next(module.source, x)
    except (StopIteration, TypeError):
        module.source = iter([0.1, 0.2, 0.3])
        return from_next(module.source, x)


@pytest.mark.parametrize("draw", [makes_its_own, makes_an_attribute, starts_over])
@pytest.mark.parametrize(("schedule", "num_ranks"), PIPELINES[:2])
def test_what_the_step_makes_is_drawn_from_alike(draw, schedule, num_ranks):
    run_both(Noisy(draw), lambda module: None, schedule, num_ranks)


@pytest.mark.parametrize("name", ["torch.Generator", "generator"])
def test_a_hook_may_put_another_one_there(name, tmp_path):
    make, draw = SOURCES[name]
    run_both(
        Noisy(lambda module, x: draw(module.source, x)),
        lambda module: None,
        "zb_v",
        1,
        between=lambda module, step: setattr(module, "source", make(tmp_path)),
    )


class NoisyBlock(nn.Linear):
    def __init__(self, generator):
        super().__init__(4, 4)
        self.generator = generator

    def forward(self, x):
        return super().forward(x + from_torch(self.generator, x))


def in_one_block(module):
    module.blocks[1] = NoisyBlock(torch.Generator().manual_seed(1)).double()


class NoisyLoss(Noisy):
    """Draws behind the blocks, where only the last stage comes, and before them if ``twice``."""

    def __init__(self, twice):
        super().__init__(None)
        self.twice = twice

    def step(self, x):
        if self.twice:
            x = x + torch.rand(4, generator=self.source)
        out = self(x)
        return (out + torch.rand(1, generator=self.source)).pow(2).mean()


def seeded(module):
    module.source = torch.Generator().manual_seed(1)


@pytest.mark.parametrize(("schedule", "num_ranks"), PIPELINES)
def test_draws_behind_the_blocks_are_those_of_one_device(schedule, num_ranks):
    run_both(NoisyLoss(twice=False), seeded, schedule, num_ranks)


@pytest.mark.parametrize(("schedule", "num_ranks"), PIPELINES)
def test_draws_in_a_block_are_those_of_one_device(schedule, num_ranks):
    module = Noisy(lambda module, x: torch.zeros(()))
    in_one_block(module)
    run_both(module, lambda module: module.blocks[1].generator.manual_seed(1), schedule, num_ranks)


class NoisyEmbedding(Noisy):
    """Draws into and by what the first stage alone has, before the blocks."""

    def forward(self, x):
        hidden = self.embed(x)
        noise = torch.empty_like(hidden.detach() * 2).normal_(generator=self.source)
        kept = torch.bernoulli(hidden.detach().sigmoid(), generator=self.source)
        later = torch.rand(4, generator=self.source)
        hidden = hidden + noise * kept
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden + later)

    def step(self, x):
        return self(x).pow(2).mean()


@pytest.mark.parametrize(("schedule", "num_ranks"), PIPELINES)
def test_draws_into_what_is_elsewhere_go_on_everywhere(schedule, num_ranks):
    run_both(NoisyEmbedding(None), seeded, schedule, num_ranks)


def test_draws_on_both_sides_of_a_cut_are_refused():
    with pytest.raises(
        ValueError, match=r"draws from self\.source .*x = x \+ .* stage 0 .*\(out \+"
    ):
        run_both(NoisyLoss(twice=True), seeded, "zb_h1", 2)
    run_both(NoisyLoss(twice=True), seeded, "zb_h1", 1)


def test_draws_of_two_blocks_on_two_stages_are_refused():
    module, generator = Noisy(lambda module, x: torch.zeros(())), torch.Generator()
    module.blocks[0], module.blocks[5] = NoisyBlock(generator), NoisyBlock(generator)
    with pytest.raises(ValueError, match=r"draws from self\.blocks\.0\.generator"):
        run_both(module, lambda module: None, "zb_h1", 2)


def test_what_nobody_has_named_is_refused_with_its_line():
    step = Noisy(lambda module, x: x * time.perf_counter())
    with pytest.raises(ValueError, match=r"mul\(\) \(.*x \* time.perf_counter\(\).* another value"):
        run_both(step, lambda module: None, "zb_h1", 2)
    run_both(Noisy(lambda module, x: x * 2), lambda module: None, "zb_h1", 2)


def test_what_only_the_last_stage_computes_may_differ():
    class Timed(Regression):
        def step(self, x):
            return super().step(x) * torch.tensor(time.perf_counter())

    pipeline = InProcessPipeline(Timed(linear_blocks(2)), build("zb_h1", 2, 4), call_step)
    pipeline.run(torch.randn(8, 4), 2)


def test_a_cache_is_no_difference():
    known = {}

    def draw(module, x):
        if "mask" not in known:
            known["mask"] = torch.ones(4).double() * 2
        return known["mask"]

    run_both(Noisy(draw), lambda module: None, "zb_h1", 2)


@pytest.mark.parametrize("schedule", ["zb_v", "zb_h1"])
def test_an_evaluation_draws_once_too(schedule):
    make, draw = SOURCES["torch.Generator"]
    module = Noisy(lambda module, x: draw(module.source, x)).double()
    plain, x = copy.deepcopy(module), torch.randn(8, 4).double()
    plan = forward_only(build(schedule, 1 if schedule == "zb_v" else 2, 4))
    pipeline = InProcessPipeline(module, plan, call_step)
    for copied in (plain, *(rank.module for rank in pipeline.ranks)):
        copied.source = make(None)
    with torch.no_grad():
        losses = pipeline.run(x, 2) + pipeline.run(x, 2)
        expected = [call_step(plain, part) for _ in range(2) for part in split_batch(x, 2)]
    torch.testing.assert_close(losses, expected)

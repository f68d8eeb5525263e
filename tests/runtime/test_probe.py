"""The probe says what cannot be cut and where, and leaves no trace."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload.runtime.block_chain import find_chain
from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.runtime.payload import BlockOutput, TensorSpec
from lightning_pipeoffload.runtime.probe import probe_step
from lightning_pipeoffload.schedule import build
from tests.runtime.models import (
    MODELS,
    Regression,
    assert_exact,
    call_step,
    linear_blocks,
    run_pipeline,
)


class Step(Regression):
    """A step in one function of embed, blocks, head and x."""

    def __init__(self, function, blocks=None):
        super().__init__(blocks or linear_blocks(4))
        self.function = function

    def step(self, x):
        return self.function(self, x)


def through(blocks, x):
    for block in blocks:
        x = block(x)
    return x


def loss_of(module, x):
    return module.head(x).pow(2).mean()


def block_twice(m, x):
    return loss_of(m, through([*m.blocks[:2], m.blocks[0], *m.blocks[2:]], x))


def out_of_order(m, x):
    return loss_of(m, through([m.blocks[0], m.blocks[2], m.blocks[1], m.blocks[3]], x))


def one_missing(m, x):
    return loss_of(m, through(m.blocks[:3], x))


def branch_before(m, x):
    x = m.embed(x)
    return loss_of(m, through(m.blocks, x if x.sum() > 0 else -x))


def branch_between(m, x):
    x = through(m.blocks[:2], x)
    return loss_of(m, through(m.blocks[2:], x * x.max().item()))


def mask_before(m, x):
    x = m.embed(x)
    return loss_of(m, through(m.blocks, x[x[:, 0] > 0]))


def without_gradients(m, x):
    with torch.no_grad():
        x = m.blocks[0](x)
    return loss_of(m, through(m.blocks[1:], x))


def reentrant(m, x):
    for block in m.blocks:
        x = checkpoint(block, x.requires_grad_(), use_reentrant=True)
    return loss_of(m, x)


def skip_over_blocks(m, x):
    first = m.embed(x)
    return loss_of(m, m.blocks[3](through(m.blocks[:3], first) + first))


def skip_between_blocks(m, x):
    first = m.blocks[0](x)
    return loss_of(m, first + through(m.blocks[1:], first))


def penalty_before(m, x):
    penalty = sum(p.pow(2).sum() for p in m.parameters())
    return penalty + loss_of(m, through(m.blocks, x))


def weight_view_before(m, x):
    transposed = m.embed.weight.t()
    return (through(m.blocks, m.embed(x)) @ transposed).pow(2).mean()


def losses_of_blocks(m, x):
    losses = []
    for block in m.blocks:
        x = block(x)
        losses.append(x.pow(2).mean())
    return sum(losses)


def losses_by_hooks(m, x):
    losses = []
    hooks = [b.register_forward_hook(lambda b, i, out: losses.append(out.mean())) for b in m.blocks]
    loss = loss_of(m, through(m.blocks, x))
    for hook in hooks:
        hook.remove()
    return loss + sum(losses)


REFUSED = {
    block_twice: "the step calls blocks.0 again; a pipeline needs each entry of blocks called once",
    out_of_order: "the step calls blocks.2 before blocks.1; a pipeline needs each entry",
    one_missing: "the step does not call blocks.3; a pipeline needs each entry of blocks called",
    branch_before: "needs a value before blocks.0 has run that only one stage has: _local_scalar_d",
    branch_between: "needs a value before blocks.2 has run .*computed from the output of blocks.1",
    mask_before: "needs a value before blocks.0 .* computed from embed.bias, embed.weight",
    without_gradients: r"blocks.0 without gradients \(torch.no_grad, or a reentrant checkpoint\)",
    reentrant: r"blocks.0 without gradients \(torch.no_grad, or a reentrant checkpoint\)",
    skip_over_blocks: "computed from embed.bias, embed.weight before or in blocks.3, on stage 1, "
    "but computes it before or in blocks.0, on stage 0",
    skip_between_blocks: "computed from the output of blocks.0 behind the blocks, on stage 1",
    penalty_before: "and 9 more behind the blocks, on stage 1, but computes it before or in block",
    weight_view_before: "something computed from embed.weight behind the blocks, on stage 1",
    losses_of_blocks: "computed from the output of blocks.0 behind the blocks, on stage 1",
    losses_by_hooks: "computed from blocks.0.bias, blocks.0.weight behind the blocks, on stage 1",
}


@pytest.mark.parametrize(("step", "message"), REFUSED.items(), ids=lambda part: str(part)[10:30])
def test_a_step_that_cannot_be_cut_is_refused(step, message):
    with pytest.raises(ValueError, match=message):
        run_pipeline(Step(step), build("1f1b", 2, 2), torch.randn(4, 4), 2)


@pytest.mark.parametrize("step", [branch_before, skip_over_blocks, losses_by_hooks])
def test_a_refusal_names_the_line(step):
    with pytest.raises(ValueError, match=r"\(/.*/test_probe.py:\d+: \S.*\)"):
        run_pipeline(Step(step), build("1f1b", 2, 2), torch.randn(4, 4), 2)


class Setting(nn.Linear):
    loss = 0.0

    def forward(self, x):
        x = super().forward(x)
        self.loss = x.pow(2).mean()
        return x


def losses_in_attributes(m, x):
    return loss_of(m, through(m.blocks, x)) + sum(block.loss for block in m.blocks)


def test_a_loss_that_an_early_block_keeps_is_refused():
    module = Step(losses_in_attributes, [Setting(4, 4) for _ in range(4)])
    with pytest.raises(ValueError, match="computed from blocks.0.bias, .* behind the blocks"):
        run_pipeline(module, build("1f1b", 2, 2), torch.randn(4, 4), 2)


@pytest.mark.parametrize(
    "step", [skip_over_blocks, skip_between_blocks, penalty_before, losses_by_hooks]
)
def test_within_one_stage_values_may_skip_blocks(step):
    assert_exact(Step(step).double(), torch.randn(4, 4).double(), num_ranks=1)


def penalty_behind(m, x):
    return loss_of(m, through(m.blocks, x)) + sum(p.pow(2).sum() for p in m.parameters())


def tied_by_function(m, x):
    return (through(m.blocks, m.embed(x)) @ m.embed.weight).pow(2).mean()


@pytest.mark.parametrize("step", [penalty_behind, tied_by_function])
def test_weights_that_several_stages_use_are_shared(step):
    assert_exact(Step(step).double(), torch.randn(4, 4).double(), num_ranks=4)


def branch_behind(m, x):
    loss = loss_of(m, through(m.blocks, x))
    return loss if loss > 0 else -loss


def branch_on_batch(m, x):
    return loss_of(m, through(m.blocks, x if x.sum() > 0 else -x))


@pytest.mark.parametrize("step", [branch_behind, branch_on_batch])
def test_values_that_are_there_may_be_used(step):
    assert_exact(Step(step).double(), torch.randn(4, 4).double())


# What the probe learns


def probe(module, x):
    chain = find_chain(module)
    chain.intercept()
    return probe_step(module, chain, lambda: call_step(module, x))


def test_which_segments_use_which_weights():
    segments = probe(Step(tied_by_function), torch.ones(2, 4)).segments
    assert segments["embed.weight"] == {0, 4}
    assert segments["blocks.1.weight"] == {1}
    assert "head.weight" not in segments


def test_what_blocks_hand_on():
    found = probe(Regression(linear_blocks(2)), torch.ones(2, 4))
    expected = TensorSpec(torch.Size((2, 4)), torch.float32, True)
    assert [output.payload for output in found.outputs] == [[expected], [expected]]


def test_operations_of_each_segment():
    found = probe(Regression(linear_blocks(2)), torch.ones(2, 4))
    assert found.forward_flops == [2 * 2 * 4 * (4 + 4), 2 * 2 * 4 * 4, 2 * 2 * 4 * 1]
    assert found.weight_flops == found.forward_flops


def test_products_of_activations_have_no_weight_gradient():
    def attend(m, x):
        x = through(m.blocks, x)
        return (x @ x.t()).sum()

    found = probe(Step(attend), torch.ones(2, 4))
    assert (found.forward_flops[4], found.weight_flops[4]) == (2 * 2 * 4 * 2, 0)


@pytest.mark.parametrize(
    ("output", "is_template"),
    [(torch.ones(1), True), ((torch.ones(1), None), True), ((torch.ones(1), 2), False)],
)
def test_only_constant_payloads_are_templates(output, is_template):
    assert BlockOutput.of(output).is_template is is_template


# What the probe leaves


class Stateful(Regression):
    """Its step writes wherever a step can."""

    def __init__(self):
        super().__init__(linear_blocks(2))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.steps, self.seen, self.by_name = 0, [], {}
        self.cache = torch.zeros(2)

    def step(self, x):
        self.steps += 1
        self.count += 1
        self.mean.mul_(0.9).add_(self.embed(x).mean(0).detach())
        self.seen.append(x)
        self.by_name["x"] = x
        self.cache.add_(1)
        self.new = x
        return super().step(x) + torch.rand(()) + random.random() + np.random.rand()


def state_of(module):
    attributes = {k: v for k, v in vars(module).items() if not k.startswith("_")}
    return repr((attributes, list(module.named_buffers()), torch.get_rng_state().tolist()))


def test_the_probe_leaves_no_trace():
    module = Stateful()
    chain = find_chain(module)
    chain.intercept()
    parameters = [id(parameter) for parameter in module.parameters()]
    before = state_of(module), random.getstate(), str(np.random.get_state())
    probe_step(module, chain, lambda: module.step(torch.ones(2, 4)))
    assert (state_of(module), random.getstate(), str(np.random.get_state())) == before
    assert [id(parameter) for parameter in module.parameters()] == parameters
    assert not hasattr(module, "new")


@pytest.mark.parametrize("name", MODELS)
def test_the_probe_leaves_models_as_they_were(name):
    module = MODELS[name].make()
    before = {key: (id(t), t.clone()) for key, t in module.state_dict(keep_vars=True).items()}
    batch = MODELS[name].batch(2)
    if isinstance(batch, dict):
        batch = {**batch, "x": batch["x"].float()}
    probe(module, batch)
    after = {key: (id(t), t.clone()) for key, t in module.state_dict(keep_vars=True).items()}
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_shapes_are_probed_once():
    module = Regression(linear_blocks(2))
    pipeline = InProcessPipeline(module, build("1f1b", 1, 2), call_step)
    for size in (2, 2, 3):
        pipeline.run(torch.ones(2 * size, 4), size)
    assert len(pipeline.ranks[0]._probes) == 2

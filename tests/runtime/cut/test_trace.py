"""The trace records how the step uses its blocks and weights, and leaves the module as it was."""

import random

import numpy as np
import pytest
import torch

from lightning_pipeoffload.runtime.cut.block_chain import find_chain
from lightning_pipeoffload.runtime.cut.trace import StepTrace
from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.runtime.payload import BlockOutput, TensorSpec
from lightning_pipeoffload.schedule import build
from tests.runtime.cut.test_step_refusals import (
    hooks_of_the_step,
    penalty_before,
    write_into_a_view,
)
from tests.support.small_modules import (
    MODELS,
    Regression,
    Step,
    assert_exact,
    call_step,
    linear_blocks,
    loss_of,
    through,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("step", [penalty_before, hooks_of_the_step, write_into_a_view])
def test_within_one_stage_values_may_skip_blocks(step):
    assert_exact(Step(step).double(), torch.randn(4, 4).double(), num_ranks=1)


def penalty_behind(m, x):
    return loss_of(m, through(m.blocks, x)) + sum(p.pow(2).sum() for p in m.parameters())


def tied_by_function(m, x):
    return (through(m.blocks, m.embed(x)) @ m.embed.weight).pow(2).mean()


def fetched_before(m, x):
    weight = m.embed.weight
    x = through(m.blocks[:2], x @ weight.to(x.device))
    return (through(m.blocks[2:], x @ weight.t()) @ weight).pow(2).mean()


@pytest.mark.parametrize("step", [penalty_behind, tied_by_function, fetched_before])
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


# What is recorded


def traced(module, x):
    chain = find_chain(module)
    chain.intercept()
    return StepTrace(module, chain, CPU).trace(lambda: call_step(module, x))


def test_which_segments_use_which_weights():
    segments = traced(Step(tied_by_function), torch.ones(2, 4)).segments
    assert segments["embed.weight"] == {0, 4}
    assert segments["blocks.1.weight"] == {1}
    assert "head.weight" not in segments


def test_what_blocks_hand_on():
    found = traced(Regression(linear_blocks(2)), torch.ones(2, 4))
    expected = TensorSpec(torch.Size((2, 4)), torch.float32, True, True)
    assert [output.payload for output in found.outputs] == [[expected], [expected]]


def test_operations_of_each_segment():
    found = traced(Regression(linear_blocks(2)), torch.ones(2, 4))
    assert found.forward_flops == [2 * 2 * 4 * (4 + 4), 2 * 2 * 4 * 4, 2 * 2 * 4 * 1]
    assert found.weight_flops == found.input_flops == found.forward_flops


def test_a_frozen_product_has_only_the_gradient_of_its_input():
    module = Regression(linear_blocks(2))
    module.blocks.requires_grad_(False)
    found = traced(module, torch.ones(2, 4))
    assert found.input_flops == found.forward_flops
    assert found.weight_flops == [2 * 2 * 4 * 4, 0, 2 * 2 * 4 * 1]  # of the embedding and the head


def test_products_of_activations_have_no_weight_gradient():
    def attend(m, x):
        x = through(m.blocks, x)
        return (x @ x.t()).sum()

    found = traced(Step(attend), torch.ones(2, 4))
    assert (found.forward_flops[4], found.input_flops[4]) == (2 * 2 * 4 * 2, 2 * 2 * 2 * 4 * 2)
    assert found.weight_flops[4] == 0


@pytest.mark.parametrize(
    ("output", "is_template"),
    [(torch.ones(1), True), ((torch.ones(1), None), True), ((torch.ones(1), 2), False)],
)
def test_only_constant_payloads_are_templates(output, is_template):
    assert BlockOutput.of(output).is_template is is_template


# What is left


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


def test_the_trace_changes_nothing():
    module = Stateful()
    chain = find_chain(module)
    chain.intercept()
    parameters = [id(parameter) for parameter in module.parameters()]
    before = state_of(module), random.getstate(), str(np.random.get_state())
    StepTrace(module, chain, CPU).trace(lambda: module.step(torch.ones(2, 4)))
    assert (state_of(module), random.getstate(), str(np.random.get_state())) == before
    assert [id(parameter) for parameter in module.parameters()] == parameters
    assert not hasattr(module, "new")


@pytest.mark.parametrize("name", MODELS)
def test_the_trace_leaves_models_as_they_were(name):
    module = MODELS[name].make()
    before = {key: (id(t), t.clone()) for key, t in module.state_dict(keep_vars=True).items()}
    batch = MODELS[name].batch(2)
    if isinstance(batch, dict):
        batch = {**batch, "x": batch["x"].float()}
    traced(module, batch)
    after = {key: (id(t), t.clone()) for key, t in module.state_dict(keep_vars=True).items()}
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_shapes_are_traced_once():
    module = Regression(linear_blocks(2))
    pipeline = InProcessPipeline(module, build("1f1b", 1, 2), call_step)
    for size in (2, 2, 3):
        pipeline.run(torch.ones(2 * size, 4), size)
    assert len(pipeline.ranks[0].records.known) == 2

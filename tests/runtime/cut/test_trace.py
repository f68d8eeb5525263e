"""The trace records how the step uses its blocks and weights, and leaves the module as it was."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from lightning_pipeoffload.runtime.cut import StepTrace, find_chain
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.schedule import build
from tests.runtime.cut.test_step_refusals import (
    hooks_of_the_step,
    penalty_before,
    write_into_a_view,
)
from tests.support.in_process import InProcessPipeline
from tests.support.small_modules import (
    Regression,
    Step,
    assert_exact,
    call_step,
    linear_blocks,
    loss_of,
    through,
)

CPU = torch.device("cpu")


def penalty_after(m, x):
    return loss_of(m, through(m.blocks, x)) + sum(p.pow(2).sum() for p in m.parameters())


def tied_by_function(m, x):
    return (through(m.blocks, m.embed(x)) @ m.embed.weight).pow(2).mean()


def fetched_before(m, x):
    weight = m.embed.weight
    x = through(m.blocks[:2], x @ weight.to(x.device))
    return (through(m.blocks[2:], x @ weight.t()) @ weight).pow(2).mean()


def branch_after(m, x):
    loss = loss_of(m, through(m.blocks, x))
    return loss if loss > 0 else -loss


def branch_on_batch(m, x):
    return loss_of(m, through(m.blocks, x if x.sum() > 0 else -x))


def mapped_over_rows(m, x):
    x = torch.func.vmap(lambda row: m.embed(row / row.norm()))(x)
    x = through(m.blocks, x)
    return torch.func.vmap(lambda row: m.head(row).pow(2).mean())(x).mean()


def mask_of_flex_attention(m, x):
    length = torch.tensor(3)
    mask = create_block_mask(lambda b, h, q, k: (q >= k) & (k < length), 1, 1, 4, 4, device="cpu")
    return loss_of(m, through(m.blocks, x * mask.to_dense().sum()))


WITHIN_A_STAGE = [penalty_before, hooks_of_the_step, write_into_a_view]
WEIGHTS_OF_SEVERAL_STAGES = [penalty_after, tied_by_function, fetched_before]
VALUES_THAT_ARE_THERE = [branch_after, branch_on_batch, mapped_over_rows, mask_of_flex_attention]


@pytest.mark.parametrize(
    ("step", "num_ranks"),
    [
        *((step, 1) for step in WITHIN_A_STAGE),
        *((step, 4) for step in WEIGHTS_OF_SEVERAL_STAGES),
        *((step, 2) for step in VALUES_THAT_ARE_THERE),
    ],
)
def test_a_step_that_can_be_cut_is_exact(step, num_ranks):
    assert_exact(Step(step).double(), torch.randn(4, 4).double(), num_ranks=num_ranks)


# What is recorded


def traced(module, x):
    chain = find_chain(module)
    chain.intercept()
    return StepTrace(module, chain, CPU).trace(lambda: call_step(module, x))


def test_operations_of_each_segment():
    module = Regression(linear_blocks(2))
    found = traced(module, torch.ones(2, 4)).work
    assert found.forward_flops == [2 * 2 * 4 * (4 + 4), 2 * 2 * 4 * 4, 2 * 2 * 4 * 1]
    assert found.weight_flops == found.input_flops == found.forward_flops
    module.blocks.requires_grad_(False)
    frozen = traced(module, torch.ones(2, 4)).work
    assert frozen.input_flops == found.forward_flops
    assert frozen.weight_flops == [2 * 2 * 4 * 4, 0, 2 * 2 * 4 * 1]  # of the embedding and the head


def test_products_of_activations_have_no_weight_gradient():
    def attend(m, x):
        x = through(m.blocks, x)
        return (x @ x.t()).sum()

    found = traced(Step(attend), torch.ones(2, 4)).work
    assert (found.forward_flops[4], found.input_flops[4]) == (2 * 2 * 4 * 2, 2 * 2 * 2 * 4 * 2)
    assert found.weight_flops[4] == 0


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class ProductAndContext(torch.autograd.Function):
    backward = Product.backward

    @staticmethod
    def forward(x, weight):
        return x @ weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)


@pytest.mark.parametrize("product", [Product, ProductAndContext])
def test_a_product_in_an_autograd_function_has_a_backward(product):
    def with_product(multiply):
        step = Step(lambda m, x: loss_of(m, multiply(through(m.blocks, x), m.embed.weight)))
        return traced(step, torch.ones(2, 4)).work

    found, expected = with_product(product.apply), with_product(torch.matmul)
    assert found.weight_flops[4] == expected.weight_flops[4] == 2 * 2 * 4 * (4 + 1)
    for name in ("forward_flops", "input_flops", "training_flops"):
        assert getattr(found, name) == getattr(expected, name)


def test_the_mask_of_a_block_has_no_values():
    kinds = []

    class Dropping(nn.Linear):
        def forward(self, x):
            mask = torch.empty_like(x).bernoulli_(0.5)  # as dropout draws it
            kinds.append(type(mask))
            return super().forward(x * mask)

    blocks = [Dropping(4, 4), Dropping(4, 4)]
    traced(Regression(blocks), torch.ones(2, 4))
    assert kinds == [ShapeOnly, ShapeOnly]


def test_a_written_weight_is_told_from_others_that_share_their_shape():
    def write(m, x):
        m.blocks[1].weight.data.mul_(0.9)
        return loss_of(m, through(m.blocks, x))

    module = Step(write)
    meta = torch.empty(4, 4, device="meta")
    for block in module.blocks:  # as layers of other ranks that configure_model has made
        block._parameters["weight"] = ShapeOnly(meta, CPU, frozenset(("a weight",)), True)
    names = {write.name for write in traced(module, torch.ones(2, 4)).writes.weights}
    assert names == {"blocks.1.weight"}


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


def test_shapes_are_traced_once():
    module = Regression(linear_blocks(2))
    pipeline = InProcessPipeline(module, build("1f1b", 1, 2), call_step)
    for size in (2, 2, 3):
        pipeline.run(torch.ones(2 * size, 4), size)
    assert len(pipeline.ranks[0].records.by_key) == 2

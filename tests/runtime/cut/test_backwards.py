"""Backwards of the loss, and those that a step starts itself, wherever the module is cut.

Weights that the loss does not lead back to keep no gradient. A backward of the step's own is right
within a stage, and refused where it crosses a cut.
"""

import inspect

import pytest
import torch
from torch import nn

from lightning_pipeoffload.schedule import build
from tests.support.pairs import pairs
from tests.support.small_modules import (
    Step,
    compare_with_plain,
    linear_blocks,
    loss_of,
    run_pipeline,
    through,
)


def six(function, blocks=None, tied=False):
    """Make a module of six blocks."""
    module = Step(function, blocks or linear_blocks(6))
    if tied:
        module.head = nn.Linear(4, 4, bias=False)
        module.head.weight = module.embed.weight
    return module


def detached_at(cut):
    def step(m, x):
        x = through(m.blocks[:cut], m.embed(x)).detach()
        return loss_of(m, through(m.blocks[cut:], x))

    return step


def plain(m, x):
    return loss_of(m, through(m.blocks, m.embed(x)))


def carried_and_detached(m, x):
    early = m.embed(x)
    h = through(m.blocks[:2], x)
    later = h * early
    h = through(m.blocks[2:4], h) + later.detach() + early.detach()
    return loss_of(m, through(m.blocks[4:], h))


def carried_by_one_of_two_uses(m, x):
    early = m.embed(x)
    h = through(m.blocks[:1], early.detach()) + early
    h = through(m.blocks[1:5], h) + early.detach()
    return m.head(through(m.blocks[5:], h.detach())).pow(2).mean() + h.mean()


def carried_as_views(m, x):
    early = m.embed(x)
    left, right = early.chunk(2, 1)
    h = through(m.blocks[:2], early.detach())
    h = through(m.blocks[2:4], h + torch.cat([left, left], 1).detach())
    return m.head(through(m.blocks[4:], h + torch.cat([right, right], 1))).pow(2).mean()


def early_exit(m, x):
    h = through(m.blocks[:2], m.embed(x))
    loss = loss_of(m, h)
    through(m.blocks[2:], h)
    return loss


def early_exit_and_the_rest_detached(m, x):
    h = through(m.blocks[:2], m.embed(x))
    return h.pow(2).mean() + m.head(through(m.blocks[2:], h.detach())).mean()


def head_detached(m, x):
    h = through(m.blocks, m.embed(x).detach())
    m.head(h.detach())
    return h.pow(2).mean()


class Detaching(nn.Linear):
    def forward(self, x):
        return super().forward(x.detach())


class WithoutGradients(nn.Linear):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x)


class Pair(nn.Module):
    """A value, and another one next to it."""

    def __init__(self):
        super().__init__()
        self.main, self.side, self.between = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, pair):
        x, y = pair
        return self.main(x), self.side(y) + self.between(x)


def of_pairs(choose):
    def step(m, x):
        return choose(through(m.blocks, (m.embed(x), x))).pow(2).mean()

    return step


def side_detached(m, x):
    pair = m.embed(x), x
    for block in m.blocks:
        x, y = block(pair)
        pair = x, y.detach()
    return (x + y).pow(2).mean()


def with_block(block, place):
    blocks = linear_blocks(6)
    blocks[place] = block(4, 4)
    return blocks


STEPS = {
    **{f"detached before {cut}": lambda c=cut: six(detached_at(c)) for cut in (0, 2, 3, 5, 6)},
    "block that detaches": lambda: six(plain, with_block(Detaching, 3)),
    "last block that detaches": lambda: six(plain, with_block(Detaching, 5)),
    "block without gradients": lambda: six(plain, with_block(WithoutGradients, 2)),
    "carried and detached": lambda: six(carried_and_detached),
    "carried by one of two uses": lambda: six(carried_by_one_of_two_uses),
    "carried as views": lambda: six(carried_as_views),
    "early exit": lambda: six(early_exit),
    "early exit, the rest detached": lambda: six(early_exit_and_the_rest_detached),
    "side only": lambda: six(of_pairs(lambda pair: pair[1]), [Pair() for _ in range(6)]),
    "main only": lambda: six(of_pairs(lambda pair: pair[0]), [Pair() for _ in range(6)]),
    "side detached": lambda: six(side_detached, [Pair() for _ in range(6)]),
    "tied, embedding detached": lambda: six(detached_at(0), tied=True),
    "tied, both detached": lambda: six(head_detached, tied=True),
}


@pytest.mark.parametrize(("name", "pipeline"), pairs([*STEPS], [("1f1b", 1), ("zb_v", 2)]))
def test_what_gets_no_gradient_keeps_none(name, pipeline):
    module, x = STEPS[name]().double(), torch.randn(8, 4).double()
    for cut in (pipeline, ("zb_h1", 3)):
        compare_with_plain(module, *cut, [x])


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


class Stopping(nn.Linear):
    def forward(self, x):
        return super().forward(Stop.apply(x))


def detached_by_chance(m, x):
    h = through(m.blocks[:3], m.embed(x))
    h = h.detach() if float(x[0, 0]) > 0 else h
    return loss_of(m, through(m.blocks[3:], h))


@pytest.mark.parametrize("detached_first", [False, True])
def test_a_detach_that_depends_on_values_is_refused(detached_first):
    x = torch.ones(8, 4)
    x[2 if detached_first else 0] *= -1
    x[4:] *= -1
    message = "does not lead back to the same values after blocks.2 .* a detach"
    with pytest.raises(RuntimeError, match=message):
        run_pipeline(six(detached_by_chance), build("zb_h1", 2, 4), x, 2)


def test_a_function_that_returns_no_gradient():
    module, x = six(plain, with_block(Stopping, 3)).double(), torch.ones(8, 4).double()
    compare_with_plain(module, "zb_h1", 1, [x])
    with pytest.raises(RuntimeError, match="the backward of a custom function returns None"):
        run_pipeline(module, build("zb_h1", 2, 4), x, 2)


# Backwards that the step starts itself


def differentiating(way, block=lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh())):
    def step(m, x):
        x = x.clone().requires_grad_()
        first = m.embed(x)
        hidden = through(m.blocks, first)
        loss = loss_of(m, hidden)
        return loss + way(m, loss, x, first, hidden)

    return Step(step, [block() for _ in range(4)]).double()


def of_input(net, loss, x, first, hidden):
    return torch.autograd.grad(loss, x, create_graph=True)[0].pow(2).mean()


def of_first_hidden(net, loss, x, first, hidden):
    (found,) = torch.autograd.grad(loss, inputs=first, create_graph=True, allow_unused=True)
    return 0 if found is None else found.pow(2).mean()


def of_weight(net, loss, x, first, hidden):
    (found,) = torch.autograd.grad(loss, net.head.weight, create_graph=True, allow_unused=True)
    return 0 if found is None else found.pow(2).mean()


def of_last_hidden(net, loss, x, first, hidden):
    return torch.autograd.grad(loss, hidden, create_graph=True)[0].pow(2).mean()


def own_loss(net, loss, x, first, hidden):
    hidden.pow(2).mean().backward(retain_graph=True)
    return 0


def own_loss_by_function(net, loss, x, first, hidden):
    torch.autograd.backward([hidden.pow(2).mean()], retain_graph=True)
    return 0


WAYS = [of_input, of_first_hidden, of_weight, of_last_hidden, own_loss, own_loss_by_function]


@pytest.mark.parametrize("way", WAYS)
def test_none_crosses_a_cut(way):
    module, batches = differentiating(way), [torch.randn(8, 4).double()]
    compare_with_plain(module, "zb_h1", 1, batches)  # one stage differentiates as it likes
    for pipeline in [("zb_h1", 2), ("zb_v", 1)]:
        if way is of_last_hidden:
            compare_with_plain(module, *pipeline, batches)
            continue
        with pytest.raises(ValueError, match="the step starts a backward of its own") as refused:
            compare_with_plain(module, *pipeline, batches)
        is_seen = "handle_torch_function" in inspect.getsource(torch.autograd.backward)
        is_named = way is not own_loss_by_function or is_seen
        assert (__file__ in str(refused.value)) is is_named


class Energy(nn.Module):
    """Goes down the gradient of an energy."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.enable_grad():
            energy = self.linear(x).tanh().pow(2).sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.1 * slope


class WeighedByItself(Energy):
    def forward(self, x):
        y = self.linear(x)
        weight = self.linear.weight
        (slope,) = torch.autograd.grad(y.pow(2).sum(), weight, create_graph=True, allow_unused=True)
        return y if slope is None else y + 0.01 * x @ slope


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
@pytest.mark.parametrize("block", [Energy, WeighedByItself])
def test_a_block_may_differentiate_twice(block, schedule):
    module = differentiating(lambda *values: 0, block)
    compare_with_plain(module, schedule, 2, [torch.randn(8, 4).double()])

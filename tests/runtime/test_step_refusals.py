"""Steps that cannot be cut: each message in full, for it is all that the user gets to see."""

import inspect

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload.schedule import build
from tests.runtime.models import Regression, linear_blocks, run_pipeline

HERE = "# <- named in the message"


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


def line_of(function):
    """Name the marked line of ``function`` as a message does."""
    lines, first = inspect.getsourcelines(function)
    (number,) = (first + i for i, line in enumerate(lines) if HERE in line)
    return f"({__file__}:{number}: {lines[number - first].strip()})"


# Calls of blocks


def block_twice(m, x):
    x = through(m.blocks[:2], x)
    x = m.blocks[0](x)  # <- named in the message
    return loss_of(m, through(m.blocks[2:], x))


def out_of_order(m, x):
    x = m.blocks[0](x)
    x = m.blocks[2](x)  # <- named in the message
    return loss_of(m, m.blocks[3](m.blocks[1](x)))


def without_gradients(m, x):
    with torch.no_grad():
        x = m.blocks[0](x)  # <- named in the message
    return loss_of(m, through(m.blocks[1:], x))


def reentrant(m, x):
    for block in m.blocks:
        x = checkpoint(block, x.requires_grad_(), use_reentrant=True)  # <- named in the message
    return loss_of(m, x)


ONCE = "a pipeline needs each entry of blocks called once and in order"
NO_GRAD = "leave out torch.no_grad(), and write checkpoint(..., use_reentrant=False)"
CALLS = {
    block_twice: f"the step calls blocks.0 again {{line}}; {ONCE}",
    out_of_order: f"the step calls blocks.2 before blocks.1 {{line}}; {ONCE}",
    without_gradients: f"the step calls blocks.0 without gradients {{line}}: {NO_GRAD}",
    reentrant: f"the step calls blocks.0 without gradients {{line}}: {NO_GRAD}",
}


# Values that are needed too early


def branch_before(m, x):
    x = m.embed(x)
    x = x if x.sum() > 0 else -x  # <- named in the message
    return loss_of(m, through(m.blocks, x))


def branch_that_is_caught(m, x):
    x = m.embed(x)
    try:
        x = x if x.sum() > 0 else -x  # <- named in the message
    except Exception:
        x = 2 * x
    return loss_of(m, through(m.blocks, x))


def formatting_before(m, x):
    x = m.embed(x)
    m.text = f"{x.mean():.3f}"  # <- named in the message
    return loss_of(m, through(m.blocks, x))


def list_before(m, x):
    x = m.embed(x)
    m.values = x.tolist()  # <- named in the message
    return loss_of(m, through(m.blocks, x))


def numpy_before(m, x):
    x = m.embed(x)
    m.values = x.detach().numpy()  # <- named in the message
    return loss_of(m, through(m.blocks, x))


def item_between(m, x):
    x = through(m.blocks[:2], x)
    x = x * x.max().item()  # <- named in the message
    return loss_of(m, through(m.blocks[2:], x))


def mask_before(m, x):
    x = m.embed(x)
    x = x[x[:, 0] > 0]  # <- named in the message
    return loss_of(m, through(m.blocks, x))


def early(block, operation, origins):
    return (
        f"the step cannot be cut into stages, for only one of them has what it needs before "
        f"{block}: {operation} needs the value of something computed from {origins} {{line}}; move "
        f"it behind blocks.3, where the last stage has all values, or compute it from the batch"
    )


EMBED = "embed.bias, embed.weight"
BRANCH = "a branch, a print or item()"
EARLY = {
    branch_before: early("blocks.0", BRANCH, EMBED),
    branch_that_is_caught: early("blocks.0", BRANCH, EMBED),
    formatting_before: early("blocks.0", "the format '.3f'", EMBED),
    list_before: early("blocks.0", "tolist()", EMBED),
    numpy_before: early("blocks.0", "numpy()", EMBED),
    item_between: early("blocks.2", BRANCH, "the output of blocks.1"),
    mask_before: early("blocks.0", "indexing with a mask", EMBED),
}


# Values beside the blocks


def x0_skip(m, x):
    first = x = m.embed(x)
    for block in m.blocks:
        x = block(x + first)  # <- named in the message
    return loss_of(m, x)


def unet_skips(m, x):
    first = m.blocks[0](x)
    x = second = m.blocks[1](first)
    x = m.blocks[2](x + second)
    x = m.blocks[3](x + first)  # <- named in the message
    return loss_of(m, x)


def hidden_states_in_the_loss(m, x):
    states = []
    for block in m.blocks:
        x = block(x)
        states.append(x)
    return loss_of(m, x) + torch.stack(states).mean()  # <- named in the message


def auxiliary_losses(m, x):
    losses = []
    for block in m.blocks:
        x = block(x)
        losses.append(x.pow(2).mean())
    return loss_of(m, x) + sum(losses)  # <- named in the message


def auxiliary_losses_by_hooks(m, x):
    losses = []
    hooks = [b.register_forward_hook(lambda b, i, out: losses.append(out.mean())) for b in m.blocks]
    loss = loss_of(m, through(m.blocks, x))
    for hook in hooks:
        hook.remove()
    return loss + sum(losses)  # <- named in the message


def penalty_before(m, x):
    penalty = sum(p.pow(2).sum() for p in m.parameters())
    loss = loss_of(m, through(m.blocks, x))
    return penalty + loss  # <- named in the message


def weight_view_before(m, x):
    transposed = m.embed.weight.t()
    x = through(m.blocks, m.embed(x))
    return (x @ transposed).pow(2).mean()  # <- named in the message


def beside(origins, advice):
    return (
        f"stage 1 (blocks.2 to blocks.3) needs what stage 0 (blocks.0 to blocks.1) has computed "
        f"from {origins} {{line}}, but only what a block returns goes on to the next stage; "
        f"{advice}"
    )


BETWEEN = "let each block take it and return it beside its output, or compute it from the batch"
BEHIND = "let the blocks hand it on: each takes it, adds its own share to it and returns it"
DECAY = "compute a penalty on weights behind the blocks, or as the optimizer's weight_decay"
BESIDE = {
    x0_skip: beside(EMBED, BETWEEN),
    unet_skips: beside("the output of blocks.0", BETWEEN),
    hidden_states_in_the_loss: beside("the output of blocks.0", BEHIND),
    auxiliary_losses: beside("the output of blocks.0", BEHIND),
    auxiliary_losses_by_hooks: beside("blocks.0.bias, blocks.0.weight", BEHIND),
    penalty_before: beside("blocks.0.bias, blocks.0.weight, blocks.1.bias and 9 more", DECAY),
    weight_view_before: beside("embed.weight", BEHIND),
}

REFUSED = {**CALLS, **EARLY, **BESIDE}


def refusal(module):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        run_pipeline(module, build("1f1b", 2, 2), torch.randn(4, 4), 2)
    return str(caught.value)


@pytest.mark.parametrize(("step", "message"), REFUSED.items(), ids=[f.__name__ for f in REFUSED])
def test_a_step_that_cannot_be_cut_is_refused(step, message):
    assert refusal(Step(step)) == message.format(line=line_of(step))


def one_missing(m, x):
    return loss_of(m, through(m.blocks[:3], x))


def bare_except(m, x):
    try:
        return loss_of(m, through(m.blocks, x))
    except:  # noqa: E722 - as users write it
        return None


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (one_missing, f"the step does not call blocks.3; {ONCE}"),
        (
            bare_except,
            "the step caught the signal by which a stage leaves it, so it has an `except:` or "
            "`except BaseException:` around its blocks; use `except Exception:`",
        ),
    ],
)
def test_a_step_is_refused_as_a_whole(step, message):
    assert refusal(Step(step)) == message


class Setting(nn.Linear):
    """A block that keeps a loss in an attribute, as mixtures of experts do."""

    loss = 0.0

    def forward(self, x):
        x = super().forward(x)
        self.loss = x.pow(2).mean()
        return x


def losses_in_attributes(m, x):
    loss = loss_of(m, through(m.blocks, x))
    return loss + sum(block.loss for block in m.blocks)  # <- named in the message


def test_a_loss_that_an_early_block_keeps_is_refused():
    found = refusal(Step(losses_in_attributes, [Setting(4, 4) for _ in range(4)]))
    message = beside("blocks.0.bias, blocks.0.weight", BEHIND)
    assert found == message.format(line=line_of(losses_in_attributes))


class Attending(nn.Linear):
    def forward(self, x, memory):
        return x + super().forward(x) @ memory.t() @ memory  # <- named in the message


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(linear_blocks(2))
        self.decoder = nn.ModuleList(Attending(4, 4) for _ in range(4))

    def step(self, x):
        memory = through(self.encoder, x)
        for block in self.decoder:
            x = block(x, memory)
        return x.mean()


def test_what_an_encoder_gives_every_block_of_the_decoder_is_refused():
    origins = "encoder.0.bias, encoder.0.weight, encoder.1.bias and 1 more"
    message = beside(origins, BETWEEN).replace("blocks.2 to blocks.3", "decoder.1 to decoder.3")
    message = message.replace("blocks.0 to blocks.1", "decoder.0")
    assert refusal(EncoderDecoder()) == message.format(line=line_of(Attending.forward))

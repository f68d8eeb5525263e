"""Steps that cannot be cut: each message in full, for it is all that the user gets to see."""

import inspect
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload.schedule import build
from tests.support.small_modules import (
    Step,
    assert_same,
    compare_with_plain,
    linear_blocks,
    loss_of,
    run_pipeline,
    run_plain,
    through,
)

HERE = "# <- named in the message"


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


def reentrant(m, x):
    for block in m.blocks:
        x = checkpoint(block, x.requires_grad_(), use_reentrant=True)  # <- named in the message
    return loss_of(m, x)


def in_a_function_with_setup_context(m, x):
    class Calling(torch.autograd.Function):
        @staticmethod
        def forward(block, x):
            return block(x)  # <- named in the message

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

    for block in m.blocks:
        x = Calling.apply(block, x)
    return loss_of(m, x)


def two_in_a_checkpoint(m, x):
    def middle(x):
        x = m.blocks[1](x)
        return m.blocks[2](x)  # <- named in the message

    x = checkpoint(middle, m.blocks[0](x), use_reentrant=False)
    return loss_of(m, m.blocks[3](x))


def functional_gradient(m, x):
    x = torch.func.grad(lambda y: y.pow(3).sum())(x)  # <- named in the message
    return loss_of(m, through(m.blocks, x))


IN_TURN = "a pipeline needs all entries of blocks called, for the first time in their order"
REENTRANT = "which makes its graph in the backward: write checkpoint(..., use_reentrant=False)"
THROUGH = f"{inspect.getsourcefile(through)}:{inspect.getsourcelines(through)[1] + 2}"
COMPUTED = (
    f"has computed ({THROUGH}: x = block(x)); in a pipeline a block can be called again with what "
    f"blocks before it, or the same one just before, have computed"
)
OTHERS = '; it could be cut with blocks=["blocks.1", "blocks.2", "blocks.3"]'
IN_ORDER = '; it could be cut with blocks=["blocks.0", "blocks.2", "blocks.1", "blocks.3"]'
CALLS = {
    block_twice: f"the step calls blocks.0 again {{line}} with what blocks.1 {COMPUTED}{OTHERS}",
    out_of_order: f"the step calls blocks.2 before blocks.1 {{line}}; {IN_TURN}{IN_ORDER}",
    two_in_a_checkpoint: (
        "the step checkpoints blocks.1 and blocks.2 together {line}; a stage can only compute its "
        'own blocks again, so checkpoint each by itself, or leave it to recompute="full"'
    ),
    functional_gradient: (
        "the step calls torch.func.grad, vjp, jacrev or hessian {line}, which work without "
        "saved_tensors_hooks only, and a pipeline needs these; call torch.autograd.grad("
        "..., create_graph=True) instead"
    ),
    **dict.fromkeys(
        (reentrant, in_a_function_with_setup_context),
        f"the step calls blocks.0 in an autograd function {{line}}, {REENTRANT}",
    ),
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


def numpy_before(m, x):
    x = m.embed(x)
    m.values = x.detach().numpy()  # <- named in the message
    return loss_of(m, through(m.blocks, x))


def sum_in_a_tensor(m, x):
    total = torch.zeros(())
    for block in m.blocks:
        x = block(x)
        total += x.mean()  # <- named in the message
    return loss_of(m, x) + total


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
        f"it after blocks.3, where the last stage has all values, or compute it from the batch"
    )


EMBED = "embed.bias, embed.weight"
BRANCH = "a branch, a print or item()"
EARLY = {
    branch_before: early("blocks.0", BRANCH, EMBED),
    branch_that_is_caught: early("blocks.0", BRANCH, EMBED),
    formatting_before: early("blocks.0", "the format '.3f'", EMBED),
    numpy_before: early("blocks.0", "numpy()", EMBED),
    item_between: early("blocks.2", BRANCH, "the output of blocks.1"),
    sum_in_a_tensor: early(
        "blocks.1", "add_() into a tensor of this stage", "the output of blocks.0"
    ),
    mask_before: early("blocks.0", "indexing with a mask", EMBED),
}


# Values outside of the blocks that cannot be sent


def penalty_before(m, x):
    penalty = sum(p.pow(2).sum() for p in m.parameters())
    loss = loss_of(m, through(m.blocks, x))
    return penalty + loss  # <- named in the message


def hooks_of_the_step(m, x):
    losses = []
    hooks = [b.register_forward_hook(lambda b, i, out: losses.append(out.mean())) for b in m.blocks]
    loss = loss_of(m, through(m.blocks, x))
    for hook in hooks:
        hook.remove()
    return loss + sum(losses)


def write_into_a_view(m, x):
    x = m.blocks[0](x)
    first = 2 * x
    rows = first[:1]
    x = m.blocks[2](m.blocks[1](x))
    rows += 1
    return loss_of(m, m.blocks[3](x + first))  # <- named in the message


CARRIED = {
    penalty_before: (
        "stage 1 (blocks.2 to blocks.3) needs what stage 0 (blocks.0 to blocks.1) has computed "
        "from blocks.0.bias, blocks.0.weight, blocks.1.bias and 9 more {line}, but that stage does "
        "not have all of these weights; compute a penalty on weights after the blocks, or use the "
        "optimizer's weight_decay"
    ),
    hooks_of_the_step: (
        "the step uses a value that a hook on blocks.0 has stored, and registers and removes that "
        "hook itself, but only the last stage reaches the code that removes it; register it once, "
        "in __init__ or in setup()"
    ),
    write_into_a_view: (
        "stage 1 (blocks.2 to blocks.3) writes in place into what it gets from stage 0 under "
        "another name, computed from the output of blocks.0, and it is read {line} after that; "
        "each name is sent on its own, so the write would not be seen: compute a new tensor "
        "instead (x = x + y for x += y)"
    ),
}

# Writes into weights that another stage has


def normal(weight):
    return weight / weight.norm()


def writing(write):
    """Make a step that writes the head's weight before the blocks."""

    def step(m, x):
        with torch.no_grad():
            write(m.head)
        return loss_of(m, through(m.blocks, m.embed(x)))

    step.__name__ = write.__name__
    return step


def copies(head):
    head.weight.copy_(normal(head.weight))  # <- named in the message


def assigns_data(head):
    head.weight.data = normal(head.weight.data)  # <- named in the message


def writes_data(head):
    head.weight.data.div_(2)  # <- named in the message


def writes_a_row(head):
    head.weight[0] = 1.0  # <- named in the message


def writes_with_out(head):
    torch.mul(head.weight, 0.5, out=head.weight)  # <- named in the message


def writes_several(head):
    torch._foreach_mul_([head.weight, head.bias], 0.5)  # <- named in the message


def initializes(head):
    nn.init.zeros_(head.weight)  # <- named in the message


def assigns_a_parameter(head):
    head.weight = nn.Parameter(normal(head.weight))  # <- named in the message


WRITES = [
    copies, assigns_data, writes_data, writes_a_row, writes_with_out, writes_several, initializes,
    assigns_a_parameter,
]  # fmt: skip
WRITTEN = (
    "the step writes head.weight before blocks.0 {line}, on stage 0, but stage 1 has this weight "
    "too and would not see it; write it between batches, such as in on_train_batch_start(), or "
    "in code that only the stage of its block runs"
)

REFUSED = {**CALLS, **EARLY, **CARRIED}


def refusal(module):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        run_pipeline(module, build("1f1b", 2, 2), torch.randn(4, 4), 2, split="even")
    return str(caught.value)


@pytest.mark.parametrize(("step", "message"), REFUSED.items(), ids=[f.__name__ for f in REFUSED])
def test_a_step_that_cannot_be_cut_is_refused(step, message):
    line = line_of(step) if "{line}" in message else ""
    assert refusal(Step(step)) == message.format(line=line)


def test_a_cut_that_would_be_refused_is_avoided_where_another_is_left():
    module, batch = Step(write_into_a_view).double(), torch.randn(4, 4).double()
    outcome = run_pipeline(module, build("1f1b", 2, 2), batch, 2)
    assert_same(outcome, run_plain(module, batch, 2))


@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_another_stage_would_not_see_is_refused(write):
    assert refusal(Step(writing(write))) == WRITTEN.format(line=line_of(write))


def assigns_after_the_blocks(m, x):
    x = through(m.blocks, m.embed(x))
    m.head.weight = nn.Parameter(m.head.weight * 0.5)  # <- named in the message
    return loss_of(m, x)


def test_a_parameter_that_a_stage_would_keep_for_itself_is_refused():
    line = line_of(assigns_after_the_blocks)
    expected = f"the step assigns another parameter to head.weight {line}, which neither"
    assert refusal(Step(assigns_after_the_blocks)).startswith(expected)


def one_missing(m, x):
    return loss_of(m, through(m.blocks[:3], x))


def drawn_calls(m, x):
    x = m.embed(x)
    for block in m.blocks:
        if torch.rand(()) < 0.5:  # LayerDrop
            x = block(x)
    return loss_of(m, x)


def numpy_calls(m, x):
    x = m.embed(x)
    for block in m.blocks:
        if np.random.uniform() < 0.5:
            x = block(x)
    return loss_of(m, x)


@pytest.mark.parametrize("step", [drawn_calls, numpy_calls])
def test_blocks_that_are_drawn_are_said_to_be_drawn(step):
    message = refusal(Step(step))
    assert "; which blocks it calls is drawn at random (LayerDrop), and a stage needs" in message
    assert "it could be cut with" not in message


def bare_except(m, x):
    try:
        return loss_of(m, through(m.blocks, x))
    except:  # noqa: E722 - as users write it
        return None


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (
            one_missing,
            f"the step does not call blocks.3; {IN_TURN}; it could be cut with "
            f'blocks=["blocks.0", "blocks.1", "blocks.2"]',
        ),
        (
            bare_except,
            "the step caught the signal by which a stage leaves it, so it has an `except:` or "
            "`except BaseException:` around its blocks; use `except Exception:`",
        ),
    ],
)
def test_a_step_is_refused_as_a_whole(step, message):
    assert refusal(Step(step)) == message


# What blocks write into their arguments


class Filling(nn.Linear):
    def __init__(self, fill):
        super().__init__(4, 4)
        self.fill = fill

    def forward(self, x, kept):
        x = super().forward(x)
        self.fill(kept, x.pow(2).mean())
        return x


def adds_in_place(kept, loss):
    kept += loss


def adds_inside(kept, loss):
    kept["losses"][0].add_(loss)


FILLS = {adds_in_place: lambda: torch.zeros(()), adds_inside: lambda: {"losses": [torch.zeros(())]}}


@pytest.mark.parametrize(("fill", "make"), FILLS.items(), ids=[f.__name__ for f in FILLS])
def test_a_tensor_argument_that_a_block_writes_is_refused(fill, make):
    def step(m, x):
        kept = make()
        for block in m.blocks:
            x = block(x, kept)  # <- named in the message
        return loss_of(m, x) + (kept["losses"][0] if isinstance(kept, dict) else kept)

    assert refusal(Step(step, [Filling(fill) for _ in range(4)])) == (
        f"blocks.0 writes into the tensor that is its argument kept {line_of(step)}, which only "
        f"the block's own stage would see: let the block return such values with its output"
    )


class Halving(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(0.5))


def test_a_batch_that_a_block_writes_and_nothing_reads_after_it():
    blocks = [Halving(4, 4), *linear_blocks(3)]
    step = Step(lambda m, x: loss_of(m, through(m.blocks, x)), blocks)
    compare_with_plain(step.double(), "zb_h1", 2, [torch.randn(4, 4).double()])


# Modules


def test_weights_that_cannot_be_replaced_are_refused():
    step = Step(lambda m, x: loss_of(m, through(m.blocks, x)))
    step.blocks[1] = nn.LazyLinear(4)
    assert refusal(step) == (
        "blocks.1.weight is a lazy layer's parameter without a shape yet; give the layer its sizes "
        "(Linear for LazyLinear), or call the model on a batch in __init__"
    )
    step.blocks[1] = torch.jit.script(nn.Linear(4, 4))
    assert refusal(step).startswith("blocks.1 is TorchScript (Linear), which keeps its weights")


class FrozenDict(OrderedDict):
    """A dict as the config of a diffusers model."""

    def __setitem__(self, key, value):
        if hasattr(self, "is_frozen"):
            raise TypeError("this dict is frozen")
        super().__setitem__(key, value)

    update = clear = pop = None

    def __deepcopy__(self, memo):
        return self


def test_attributes_that_are_no_obstacle():
    step = Step(lambda m, x: loss_of(m, through(m.blocks, x))).double()
    step.config = FrozenDict(width=4)
    step.config.is_frozen = True
    step.norms = nn.ModuleList([None])
    compare_with_plain(step, "zb_h1", 2, [torch.randn(4, 4).double()] * 2)

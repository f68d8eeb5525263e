"""Values that go from stage to stage in addition to what the blocks return."""

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload.schedule import build, forward_only
from tests.support.in_process import InProcessPipeline
from tests.support.pairs import pairs
from tests.support.small_modules import (
    Outcome,
    Step,
    assert_same,
    call_step,
    compare_with_plain,
    linear_blocks,
    loss_of,
    run_plain,
    through,
)

DEPTH = 8


def x0_skip(m, x):
    first = x = m.embed(x)
    for block in m.blocks:
        x = block(x + first)
    return loss_of(m, x)


def residual_around_each_block(m, x):
    x = m.embed(x)
    for block in m.blocks:
        x = x + block(x)
    return loss_of(m, x)


def unet_skips(m, x):
    skips = []
    for block in m.blocks[:4]:
        x = block(x)
        skips.append(x)
    for block in m.blocks[4:]:
        x = block(x + skips.pop())
    return loss_of(m, x)


def auxiliary_losses(m, x):
    losses = []
    for block in m.blocks:
        x = block(x)
        losses.append(x.pow(2).mean())
    return loss_of(m, x) + sum(losses)


def losses_in_attributes(m, x):
    loss = loss_of(m, through(m.blocks, x))
    return loss + sum(block.loss for block in m.blocks)


def weight_view_before(m, x):
    transposed = m.embed.weight.t()
    x = through(m.blocks, m.embed(x))
    return (x @ transposed).pow(2).mean()


def written_in_place(m, x):
    total = m.embed(x) * 1
    for block in m.blocks:
        x = block(x)
        total += x
    return loss_of(m, total)


def read_out_at_the_end(m, x):
    first = m.embed(x)
    loss = loss_of(m, through(m.blocks, first))
    m.seen = f"{first:}"[:1], first.tolist(), first.detach().numpy()
    return loss + first.mean()


class Product(torch.autograd.Function):
    """A function of the user's takes its arguments as they are."""

    @staticmethod
    def forward(ctx, left, right):
        ctx.save_for_backward(left, right)
        return left * right

    @staticmethod
    def backward(ctx, grad):
        left, right = ctx.saved_tensors
        return grad * right, grad * left


def custom_function(m, x):
    first = x = m.embed(x)
    first = Product.apply(first, first)
    for block in m.blocks:
        x = Product.apply(block(x), first)
    return loss_of(m, x)


class Setting(nn.Linear):
    """A block that keeps a loss in an attribute, as mixtures of experts do."""

    def forward(self, x):
        x = super().forward(x)
        self.loss = x.pow(2).mean()
        return x


STEPS = [
    x0_skip,
    residual_around_each_block,
    unet_skips,
    auxiliary_losses,
    losses_in_attributes,
    weight_view_before,
    written_in_place,
    read_out_at_the_end,
    custom_function,
]


def module_of(step):
    return Step(step, [Setting(4, 4) for _ in range(DEPTH)]).double()


PIPELINES = [("1f1b", 2), ("zb_h1", 4), ("interleaved_1f1b", 2), ("zb_v", 2), ("zb_v", 4)]


@pytest.mark.parametrize(("step", "pipeline"), pairs(STEPS, PIPELINES))
def test_what_goes_outside_of_the_blocks_is_carried(step, pipeline):
    compare_with_plain(module_of(step), *pipeline, [torch.randn(8, 4).double()])


def test_blocks_that_are_recomputed():
    batches = [torch.randn(4, 4).double()]
    compare_with_plain(module_of(losses_in_attributes), "1f1b", 2, batches, recompute="full")


# What blocks put into their arguments


class Filling(nn.Linear):
    def __init__(self, fill):
        super().__init__(4, 4)
        self.fill = fill

    def forward(self, x, kept):
        y = super().forward(x).tanh()
        return y + self.fill(kept, x, y)


def appends_states(kept, x, y):
    kept["states"].append((x, y * 2))
    return 0


def sets_keys(kept, x, y):
    """The first block's keys are read by all, a sum is replaced, a number counts."""
    kept.setdefault("keys", y * 3)
    kept["number"] = kept.get("number", 0) + 1
    kept["sum"] = kept.get("sum", 0) + y.pow(2)
    return kept["keys"] * kept["number"]


def pushes_and_pops(kept, x, y):
    kept.append(y.sin())
    return kept.popleft() if len(kept) > 2 else 0


def keeps_lists(kept, x, y):
    kept[tuple(y.shape)].append(y.exp())
    return kept[tuple(y.shape)][0]


def keeps_objects(kept, x, y):
    kept.append(SimpleNamespace(state=y.cos()))
    return kept[0].state


def nothing_but_numbers(kept, x, y):
    kept.append(y.shape[-1])
    return 0


def fills_layers(kept, x, y):
    """Later blocks read no tensor of a cache, but how many there are."""
    next(layer for layer in kept.layers if not layer.seen).seen.append(y.sin())
    return y / sum(len(layer.seen) for layer in kept.layers)


def counts_in_parts(kept, x, y):
    kept.layers[0].count += 1
    return y / kept.layers[0].count


def make_layers():
    return SimpleNamespace(layers=[SimpleNamespace(seen=[], count=0) for _ in range(DEPTH)])


FILLS = {
    appends_states: (lambda: {"states": []}, lambda k: sum((a * b).mean() for a, b in k["states"])),
    sets_keys: (OrderedDict, lambda kept: kept["sum"].mean() * kept["number"]),
    pushes_and_pops: (deque, lambda kept: sum(value.mean() for value in kept)),
    keeps_lists: (lambda: defaultdict(list), lambda kept: sum(map(sum, kept.values())).mean()),
    keeps_objects: (list, lambda kept: sum(each.state.mean() for each in kept)),
    nothing_but_numbers: (list, sum),
    fills_layers: (make_layers, lambda kept: kept.layers[-1].seen[0].mean()),
    counts_in_parts: (make_layers, lambda kept: kept.layers[0].count),
}


def filling(fill, call=lambda block, *given: block(*given)):
    make, read = FILLS[fill]

    def step(m, x):
        kept, x = make(), m.embed(x)
        for block in m.blocks:
            x = call(block, x, kept)
        return loss_of(m, x) + read(kept)

    return Step(step, [Filling(fill) for _ in range(DEPTH)]).double()


WITH_OPTIONS = [
    (("zb_h1", 4), {}),
    (("zb_v", 2), {}),
    (("zb_h1", 1), {}),
    (("1f1b", 2), {"recompute": "full"}),
    (("po_h", 2), {}),
    (("zb_v", 2), {"recompute": "cheap"}),
]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(("pipeline", "options"), WITH_OPTIONS)
def test_what_blocks_put_into_their_arguments(fill, pipeline, options):
    batches = [torch.randn(8, 4).double()] * 2
    compare_with_plain(filling(fill), *pipeline, batches, **options)


@pytest.mark.parametrize("fill", [appends_states, nothing_but_numbers])
def test_checkpointed_blocks_that_fill_a_list(fill):
    module = filling(fill, partial(checkpoint, use_reentrant=False))
    compare_with_plain(module, "zb_v", 2, [torch.randn(8, 4).double()] * 2)


class Counting(nn.Linear):
    def forward(self, x, state):
        state.number += 1.5
        state.sums["last"] = super().forward(x).sin()
        return state.sums["last"] * state.number


def test_numbers_in_an_object():
    def step(m, x):
        state, x = SimpleNamespace(number=0, sums={}), m.embed(x)
        for block in m.blocks:
            x = block(x, state)
        return loss_of(m, x) * state.number + state.sums["last"].mean()

    module = Step(step, [Counting(4, 4) for _ in range(4)]).double()
    compare_with_plain(module, "zb_v", 2, [torch.randn(8, 4).double()])


def test_a_recomputed_block_reads_a_list_as_it_was():
    class Stacking(nn.Linear):
        def forward(self, x, states):
            return super().forward(torch.stack(states).mean(0)) + x

    def step(m, x):
        states = [m.embed(x)]
        for block in m.blocks:
            states.append(block(states[-1], states))
        return loss_of(m, states[-1])

    module = Step(step, [Stacking(4, 4) for _ in range(4)]).double()
    compare_with_plain(module, "1f1b", 2, [torch.randn(4, 4).double()], recompute="full")


def test_a_batch_that_blocks_fill():
    class Keyed(nn.Linear):
        def forward(self, x, batch):
            batch.setdefault("first", x * 2)
            return super().forward(x + batch["first"]).tanh()

    def step(m, batch):
        x = m.embed(batch["x"])
        for block in m.blocks:
            x = block(x, batch)
        return loss_of(m, x + batch["first"])

    module = Step(step, [Keyed(4, 4) for _ in range(4)]).double()
    compare_with_plain(module, "zb_v", 2, [{"x": torch.randn(4, 4).double()}])


# Values that escape through hooks


def hidden_states_by_hooks(m, x):
    m.states.clear()
    loss = loss_of(m, through(m.blocks, m.embed(x)))
    return loss + sum(state.mean() for state in m.states)


def test_hooks_that_stay():
    class Hooked(Step):
        def __init__(self, function):
            super().__init__(function, linear_blocks(4))
            self.states = []
            for block in self.blocks:
                block.register_forward_hook(self.keep)

        def keep(self, block, arguments, output):
            self.states += [arguments[0], output]

    def step(module, x):
        for block in module.blocks:  # a copied module has the hooks of the first
            block._forward_hooks = dict.fromkeys(block._forward_hooks, module.keep)
        return module.step(x)

    module, batch = Hooked(hidden_states_by_hooks).double(), torch.randn(4, 4).double()
    plain = run_plain(module, batch, 2)
    pipeline = InProcessPipeline(module, build("zb_v", 2, 2), step)
    losses = pipeline.run(batch, 2)
    assert_same(Outcome(losses, pipeline.named_gradients()), plain)


class Attending(nn.Linear):
    def forward(self, x, memory):
        return x + super().forward(x) @ memory.t() @ memory


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(linear_blocks(4))
        self.decoder = nn.ModuleList(Attending(4, 4) for _ in range(4))

    def step(self, x):
        memory = through(self.encoder, x)
        for block in self.decoder:
            x = block(x, memory)
        return x.mean()


@pytest.mark.parametrize(
    ("num_ranks", "blocks"), [(2, "decoder"), (4, "decoder"), (4, ["encoder.*", "decoder.*"])]
)
def test_an_encoders_output_in_every_block_of_a_decoder(num_ranks, blocks):
    batches = [torch.randn(4, 4).double()]
    compare_with_plain(EncoderDecoder().double(), "zb_h1", num_ranks, batches, blocks=blocks)


# What is sent


def message_sizes(step, num_ranks=4):
    module = module_of(step)
    pipeline = InProcessPipeline(module, build("1f1b", num_ranks, 1), call_step, split="even")
    pipeline.run(torch.randn(2, 4).double(), 2)
    (record,) = pipeline.ranks[0].records.by_key.values()
    return [len(record.message_specs_before(cut)) for cut in range(2, DEPTH, 2)]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (x0_skip, [2, 2, 2]),
        (residual_around_each_block, [2, 2, 2]),
        (unet_skips, [2, 4, 3]),  # the last output is sent anyway
        (auxiliary_losses, [2, 4, 6]),
    ],
)
def test_only_what_later_stages_need_is_sent(step, expected):
    assert message_sizes(step) == expected


def another_way(m, x):
    first = x = m.embed(x)
    m.calls = getattr(m, "calls", 0) + 1
    if m.calls > 1:
        x = x * 2
    first = first + 1
    for block in m.blocks:
        x = block(x + first)
    return loss_of(m, x)


def test_a_step_that_goes_another_way_than_at_first_is_refused():
    with pytest.raises(RuntimeError, match="other values between its blocks than when"):
        compare_with_plain(module_of(another_way), "zb_h1", 2, [torch.randn(4, 4).double()])


def with_a_table(m, x):
    x = m.embed(x)
    if not hasattr(m, "table"):
        m.table = torch.ones(4, dtype=x.dtype, device=x.device).cumsum(0)
    first = x = x + m.table
    for block in m.blocks:
        x = block(x + first)
    return loss_of(m, x)


def test_constants_may_be_kept_from_call_to_call():
    compare_with_plain(module_of(with_a_table), "zb_v", 2, [torch.randn(8, 4).double()] * 2)


def after_a_norm_that_counts(m, x):
    first = x = m.embed(m.norm(x))
    return loss_of(m, through(m.blocks, x) + first)


def test_a_buffer_that_another_stage_of_the_rank_writes():
    module = module_of(after_a_norm_that_counts)
    module.norm = nn.BatchNorm1d(4).double()
    compare_with_plain(module, "zb_v", 2, [torch.randn(8, 4).double()] * 2)


# In an evaluation


def gated_residual(m, x):
    for block in m.blocks:
        x = x + m.embed.bias[0] * block(x)  # a view of a weight requires a gradient without one
    return loss_of(m, x)


@torch.no_grad()
def test_what_needs_a_gradient_in_an_evaluation():
    module, batch = module_of(gated_residual), torch.randn(8, 4).double()
    plan = forward_only(build("1f1b", 2, 4))
    losses = InProcessPipeline(module, plan, call_step).run(batch, 2)
    torch.testing.assert_close(losses, run_plain(module, batch, 2).losses)


# Dataclasses that blocks return


@dataclass
class Output:
    hidden: torch.Tensor
    other: Any = None


class Returning(nn.Linear):
    def __init__(self, function, keeps=False):
        super().__init__(4, 4)
        self.function, self.keeps = function, keeps

    def forward(self, x):
        y = x + self.function(super().forward, x)
        return Output(y, Output(y.pow(2).mean()) if self.keeps else None)


def checkpointed(linear, x):
    return checkpoint(lambda y: linear(y).tanh(), x, use_reentrant=False)


def by_a_function(linear, x):
    return Product.apply(linear(x), linear(x))


def called(linear, x):
    return linear(x).tanh()


def of_dataclasses(m, x):
    x, losses = m.embed(x), []
    for block in m.blocks:
        output = block(x)
        x = output.hidden
        losses += [output.other.hidden] if block.keeps else []
    return loss_of(m, x) + sum(losses)


@pytest.mark.parametrize("function", [checkpointed, by_a_function, called])
@pytest.mark.parametrize("pipeline", [("zb_h1", 4), ("zb_v", 2)])
def test_dataclasses_are_sent_by_their_fields(function, pipeline):
    blocks = [Returning(function, keeps) for keeps in (False, True, True, False)]
    module = Step(of_dataclasses, blocks).double()
    compare_with_plain(module, *pipeline, [torch.randn(8, 4).double()])


class Transposing(nn.Linear):
    """Takes [batch, channels, time], stored as [batch, time, channels], as convolutions do."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2).view(-1, 4)).view(len(x), -1, 4).transpose(1, 2)


def transposed(m, x):
    x = first = m.embed(x).transpose(1, 2)
    for block in m.blocks:
        x = block(x)
    return (x.transpose(1, 2).view(-1) + first.transpose(1, 2).view(-1)).pow(2).mean()


def test_strides_are_kept():
    module = Step(transposed, [Transposing(4, 4) for _ in range(4)]).double()
    compare_with_plain(module, "zb_h1", 4, [torch.randn(8, 5, 4).double()])

"""What a step keeps, for a later step or for its backwards: there where it is read, or refused."""

import importlib
import inspect

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.compiled import warn_once
from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.small_modules import (
    Step,
    call_step,
    compare_with_plain,
    linear_blocks,
    loss_of,
    run_pipeline,
    through,
)

HERE = "# <- named in the message"
READS = "# <- is read"
PIPELINES = [("zb_h1", 2), ("zb_v", 2)]


def batches(count=1):
    return [torch.randn(6, 4).double() for _ in range(count)]


def step_with(function, blocks=None, **attributes):
    module = Step(function, blocks)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module.double()


def refusal(module, schedule="zb_h1", num_ranks=2):
    with pytest.raises((ValueError, RuntimeError)) as caught:
        run_pipeline(module, build(schedule, num_ranks, 3), *batches(), 2)
    return str(caught.value)


# Kept for the next step


def curriculum(m, x):
    x = m.embed(x)
    if m.running_loss < 1:  # <- is read
        x = 2 * x
    loss = loss_of(m, through(m.blocks, x))
    m.running_loss = 0.9 * m.running_loss + 0.1 * loss.detach()  # <- named in the message
    return loss


def between_the_blocks(m, x):
    x = m.embed(x) * m.count  # <- is read
    x = through(m.blocks[:3], x)
    m.count += 1  # <- named in the message
    return loss_of(m, m.blocks[3](x))


REFUSED = {
    curriculum: {"running_loss": torch.tensor(0.0)},
    between_the_blocks: {"count": 0},
}


@pytest.mark.parametrize(("step", "attributes"), REFUSED.items(), ids=[f.__name__ for f in REFUSED])
def test_what_a_later_stage_has_written_cannot_be_read(step, attributes):
    message = refusal(step_with(step, **attributes))
    (name,) = attributes
    assert message.startswith(f"self.{name} is written")
    assert READS in message
    assert HERE in message


def test_one_stage_reads_what_it_likes():
    compare_with_plain(step_with(curriculum, **REFUSED[curriculum]), "1f1b", 1, batches())


class Using(nn.Linear):
    """A block that does something with what all blocks share, or with what it has itself."""

    def __init__(self, use, shared=None):
        super().__init__(4, 4)
        self.use, self.shared, self.scale = use, shared, 1.0

    def forward(self, x):
        return self.use(self, super().forward(x))


class Shared:
    """An object that blocks have together, such as a configuration that they change."""

    calls = 0


def scales_blocks(m, x):
    loss = loss_of(m, through(m.blocks, m.embed(x)))
    for block in m.blocks:
        block.scale = block.scale / 2
    return loss


def test_a_block_cannot_read_what_the_last_stage_has_given_it():
    blocks = [Using(lambda block, x: x * block.scale) for _ in range(4)]
    message = refusal(step_with(scales_blocks, blocks))
    assert message.startswith("self.blocks.0.scale is written after the blocks")
    assert "which stage 0 does not run" in message


def counts(block, x):
    block.shared.calls += 1
    return x * block.shared.calls


def counts_in_an_object(m, x):
    m.shared.calls += 1
    return loss_of(m, through(m.blocks, m.embed(x) * m.shared.calls)) * m.shared.calls


def sharing(use, step):
    shared = Shared()
    return step_with(step, [Using(use, shared) for _ in range(4)], shared=shared)


def test_an_object_that_blocks_of_several_stages_write_is_refused():
    message = refusal(sharing(counts, lambda m, x: loss_of(m, through(m.blocks, m.embed(x)))))
    assert message.startswith("self.blocks.0.shared is written in blocks.")
    compare_with_plain(sharing(lambda block, x: x, counts_in_an_object), "zb_h1", 2, batches())


def keeps_in_validation(m, x):
    x = m.embed(x)
    if m.training:
        return loss_of(m, through(m.blocks, x * m.best))  # <- is read
    loss = loss_of(m, through(m.blocks, x))
    m.best = loss.detach()  # <- named in the message
    return loss


@pytest.mark.parametrize("modes", [(False, True), (True, False, True)])
def test_a_step_of_another_kind_may_have_written_it(modes):
    module = step_with(keeps_in_validation, best=torch.ones(()))
    pipeline = InProcessPipeline(module, build("1f1b", 2, 3), call_step)

    def run_in(mode):
        for rank in pipeline.ranks:
            rank.module.train(mode)
        pipeline.run(*batches(), 2)

    for mode in modes[:-1]:
        run_in(mode)
    with pytest.raises(RuntimeError, match=r"self\.best is written .* # <- named .* # <- is"):
        run_in(modes[-1])


def sets_before(m, x):
    m.count = 1
    loss = loss_of(m, through(m.blocks, m.embed(x) * m.count))
    m.count = 2
    return loss


def collects_on_the_way(m, x):
    for block in (m.embed, *m.blocks):
        x = block(x)
        m.seen.append(x.detach())
    return loss_of(m, x)


def clears_before(m, x):
    m.seen.clear()
    x = m.embed(x)
    for block in m.blocks:
        x = block(x)
        m.seen += [x]
    return loss_of(m, x) + sum(part.mean() for part in m.seen)


@pytest.mark.parametrize("step", [sets_before, collects_on_the_way, clears_before])
def test_what_every_reader_has_written_is_exact(step):
    compare_with_plain(step_with(step, count=0, seen=[]), "zb_h1", 2, batches())


KEEPS_A_COUNT = """
count = 0
def bump():
    global count
    count += 1
"""
IMPORTS_BY_NAME = """
from keeps_a_count import bump
from tests.support.small_modules import Step, loss_of, through
class Counts(Step):
    pass
def count_up(m, x):
    bump()
    return loss_of(m, through(m.blocks, m.embed(x)))
"""


def test_a_python_module_is_watched_of_which_only_functions_are_imported(tmp_path, monkeypatch):
    (tmp_path / "keeps_a_count.py").write_text(KEEPS_A_COUNT)
    (tmp_path / "imports_by_name.py").write_text(IMPORTS_BY_NAME)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("imports_by_name")
    message = refusal(own.Counts(own.count_up).double())
    assert message.startswith("the step writes keeps_a_count.count")


# Kept for the backward


class Block(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        self.seen = x.detach().abs().mean()
        return x + super().forward(x).tanh()


class HookedBlock(Block):
    def __init__(self):
        super().__init__()
        self.register_full_backward_hook(self.scale)

    def scale(self, module, given, gradients):
        return (given[0] * self.seen,)  # <- named in the message


class WithTensorHook(Block):
    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda g: g / self.seen)  # <- named in the message
        return y


class Counting(torch.autograd.Function):
    """Writes and reads in its backward alone."""

    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        ctx.block.count += 1
        return gradient * ctx.block.count, None


class CountingBlock(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.count = 0

    def forward(self, x):
        return Counting.apply(super().forward(x), self)


def written_after(m, x):
    hidden = m.embed(x)
    hidden.register_hook(lambda g: g * m.scale)  # <- named in the message
    loss = loss_of(m, through(m.blocks, hidden))
    m.scale = m.scale * 1.5
    return loss


def plain(m, x):
    return loss_of(m, through(m.blocks, m.embed(x)))


def of_blocks(kind):
    return step_with(plain, [kind() for _ in range(4)])


READ_IN_A_BACKWARD = {
    HookedBlock: lambda: of_blocks(HookedBlock),
    WithTensorHook: lambda: of_blocks(WithTensorHook),
    written_after: lambda: step_with(written_after, scale=1.0),
}


@pytest.mark.parametrize("read", READ_IN_A_BACKWARD)
def test_what_another_order_would_change_is_refused(read):
    lines, first = inspect.getsourcelines(read)
    (number,) = (first + i for i, line in enumerate(lines) if HERE in line)
    for pipeline in PIPELINES:
        message = refusal(READ_IN_A_BACKWARD[read](), *pipeline)
        assert "which the step writes, is read in a backward" in message
        assert f"{__file__}:{number}:" in message
    compare_with_plain(READ_IN_A_BACKWARD[read](), "1f1b", 1, batches())


def test_a_step_that_writes_attributes_and_hooks_tensors_is_told_so_once(caplog):
    warn_once.cache_clear()
    refusal(of_blocks(WithTensorHook))
    (notice,) = [r.message for r in caplog.records if "hook on a tensor" in r.message]
    assert "test_attributes.py" in notice


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_what_only_the_blocks_own_backwards_use_is_exact(pipeline):
    found, _ = compare_with_plain(of_blocks(CountingBlock), *pipeline, batches())
    for rank in found.ranks:
        for stage in rank.tensors.local_stages:
            for index in rank.cut.stages[stage].blocks:
                assert rank.module.blocks[index].count == 3


def descends(weight):
    weight.data.sub_(0.1 * weight.grad)


def test_a_hook_that_writes_its_weight_is_refused():
    def step(m, x):
        if not m.embed.weight._post_accumulate_grad_hooks:
            m.embed.weight.register_post_accumulate_grad_hook(descends)
        return plain(m, x)

    assert "a hook on embed.weight writes the weight" in refusal(step_with(step))


def hooked_between(m, x):
    hidden = m.embed(x)
    for block in m.blocks:
        hidden = block(hidden)
        hidden.register_hook(lambda g: g * 0.5)
        hidden.retain_grad()
    return loss_of(m, hidden)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_hook_on_a_value_is_called_where_the_value_is(pipeline):
    compare_with_plain(step_with(hooked_between), *pipeline, batches())


class Outer(nn.Module):
    """Has a backward hook on a module that several stages run."""

    def __init__(self, embeds):
        super().__init__()
        self.inp = nn.Linear(4, 4) if embeds else nn.Identity()
        self.inner = nn.Sequential(nn.Sequential(*linear_blocks(4)), nn.Linear(4, 1)).double()
        self.inner.register_full_backward_hook(self.look)
        self.embeds = embeds
        self.double()

    def look(self, module, given, gradients):
        return (given[0] * 2,) if self.embeds else None

    def step(self, x):
        return self.inner(self.inp(x)).pow(2).mean()


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_backward_hook_on_what_a_cut_goes_through_is_refused():
    for pipeline in PIPELINES:
        message = refusal(Outer(embeds=True), *pipeline)
        assert "a backward hook is registered on inner, which begins on stage 0" in message
    compare_with_plain(Outer(embeds=True), "zb_h1", 1, batches())
    compare_with_plain(Outer(embeds=False), "zb_h1", 2, batches())  # it is given no gradient

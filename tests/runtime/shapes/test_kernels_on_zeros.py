"""Kernels that take addresses train exactly; where values are missing they run on zeros, once."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from lightning_pipeoffload.runtime.cut import StepRecords, find_chain
from lightning_pipeoffload.runtime.measure import measure_saved_memory
from lightning_pipeoffload.runtime.run import split_into_microbatches
from lightning_pipeoffload.schedule import build
from tests.support import fits
from tests.support.address_kernels import Cubed, Gate, Silu, memory, seeded, silu
from tests.support.in_process import InProcessPipeline
from tests.support.pairs import slow
from tests.support.small_modules import (
    Step,
    call_step,
    compare_with_plain,
    loss_of,
    through,
    users_step,
)

WIDTH = 4


class Gated(nn.Module):
    def __init__(self, activation=silu):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.activation = activation

    def forward(self, x):
        self.seen = self.activation(self.up(x))
        return x + self.down(self.seen)


def in_blocks(m, x):
    return loss_of(m, through(m.blocks, x))


def before_the_blocks(m, x):
    return loss_of(m, through(m.blocks, silu(m.embed(x))))


def around_the_blocks(m, x):
    first = silu(m.embed(x)) * 2
    x = through(m.blocks[:2], first)
    second = silu(x + first)
    return loss_of(m, silu(through(m.blocks[2:], second)) * second + first)


def in_the_final_norm(m, x):
    return loss_of(m, silu(functional.layer_norm(through(m.blocks, x), [WIDTH])))


def in_the_loss(m, x):
    return silu(m.head(through(m.blocks, x)).pow(2)).mean()


def backward_alone(m, x):
    return loss_of(m, through(m.blocks, Cubed.apply(x)))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        memory(x)[:] *= 2
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def in_place(m, x):
    return loss_of(m, through(m.blocks, Doubled.apply(m.embed(x))))


def of_an_opened_block(m, x):
    x = through(m.blocks, x)
    return loss_of(m, x) + sum(block.seen.pow(2).mean() for block in m.blocks)


STEPS = [
    in_place,
    of_an_opened_block,
    in_blocks,
    before_the_blocks,
    around_the_blocks,
    in_the_final_norm,
    in_the_loss,
]


def train(step, blocks, schedule="zb_h1"):
    batches = torch.randn(2, 4, WIDTH).double()
    return compare_with_plain(Step(step, blocks).double(), schedule, 2, batches, size=1)


@pytest.mark.parametrize("step", [*STEPS, backward_alone])
@pytest.mark.parametrize("schedule", ["zb_h1", slow("zb_v")])
def test_a_function_with_a_kernel_trains_exactly(step, schedule):
    train(step, [Gated() for _ in range(8)], schedule)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(x):
        memory(x.contiguous())
        return x.square()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * gradient * x


@pytest.mark.parametrize("activation", [Silu.apply, Squared.apply, lambda x: Squared.apply(x)])
def test_forms_of_functions_train_exactly(activation):
    train(in_blocks, [Gated(activation) for _ in range(4)])


def around_a_module(m, x):
    first = m.blocks[0](m.embed(x))
    gated = m.head[0](first)
    return m.head(through(m.blocks[1:], gated) + gated).mean()


def test_a_module_with_a_kernel_trains_exactly(caplog):
    train(in_blocks, [nn.Sequential(nn.Linear(WIDTH, WIDTH), Gate(WIDTH)) for _ in range(4)])
    train(in_blocks, [Gate(WIDTH) for _ in range(4)])


def test_a_module_between_the_blocks_trains_exactly():
    module = Step(around_a_module).double()
    module.head = nn.Sequential(Gate(WIDTH)).double()
    compare_with_plain(module, "zb_h1", 2, torch.randn(2, 4, WIDTH).double(), size=1)


def test_one_run_on_zeros_for_each_shape(caplog):
    caplog.set_level(logging.INFO)
    module = Step(in_blocks, [Gated() for _ in range(8)])
    pipeline = InProcessPipeline(module, build("zb_h1", 2, 4), call_step)
    rank = pipeline.ranks[0]
    counts = []
    for length in (4, 4, 8):
        before = Silu.num_runs
        split_into_microbatches(
            rank, torch.randn(length, WIDTH), length // 4, users_step(rank.module.step), "train", 0
        )
        counts.append(Silu.num_runs - before)
    assert counts == [1, 0, 1]
    (record,) = [record for record in caplog.records if "kernel" in record.message]
    assert record.message.startswith("Silu calls a kernel with the addresses of tensors")


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        memory(x.contiguous())
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_blocks_with_the_same_kernel_are_alike():
    def of(factor):
        return Gated(lambda x: Scaled.apply(x, factor))

    chain = find_chain(module := Step(in_blocks, [of(1), of(1), of(2), of(1)]))
    chain.intercept()
    records = StepRecords(module, chain, torch.device("cpu"))
    record = records.find_or_trace("train", torch.randn(2, WIDTH), users_step(module.step))
    _, second, other, last, _ = record.work.digests  # the first one's input requires no gradient
    assert second == last != other


@pytest.mark.parametrize("recompute", ["none", "cheap", "full"])
def test_what_such_a_function_saves_is_counted(recompute):
    kept = []
    for activation in (silu, lambda x: functional.silu(x)):
        module = Step(in_blocks, [Gated(activation) for _ in range(4)])
        plan = build("zb_h1", 2, 4)
        pipeline = InProcessPipeline(module, plan, call_step, recompute=recompute)
        rank = pipeline.ranks[0]
        part, *_ = split_into_microbatches(
            rank, torch.randn(4, WIDTH), 1, users_step(rank.module.step), "train", 0
        )
        kept.append([vars(found) for found in measure_saved_memory(rank, part)])
    assert kept[0] == kept[1]


def in_the_step_itself(m, x):
    x = m.embed(x)
    memory(x.detach().contiguous())
    return loss_of(m, through(m.blocks, x))


def after_the_blocks(m, x):
    loss = loss_of(m, through(m.blocks, m.embed(x)))
    memory(loss.detach())
    return loss


held = Silu.apply


def by_a_reference(m, x):
    return held(m.head(through(m.blocks, m.embed(x)))).mean()


class Stored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.untyped_storage().data_ptr()
        return x * 2


stored = Stored.apply


def of_a_storage(m, x):
    return loss_of(m, through(m.blocks, stored(m.embed(x))))


class OnlyOnes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        assert memory(x.contiguous()).any(), "no zeros"
        return x * 2


def of_ones_alone(m, x):
    return loss_of(m, through(m.blocks, OnlyOnes.apply(m.embed(x))))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (in_the_step_itself, r"address .* from embed.*: call it in an autograd.Function.*data_ptr"),
        (after_the_blocks, r"address .* from head.*: call it in an autograd.Function.*data_ptr"),
        (by_a_reference, r"address .* from head.*: Silu is called by a reference .*; call Silu.ap"),
        (of_a_storage, r"address .* from a weight or .*: Stored is called by a ref.*data_ptr"),
        (of_ones_alone, r"OnlyOnes calls it, and fails on zeros too \(AssertionError: no zeros"),
    ],
)
def test_what_cannot_run_on_zeros_is_refused_by_name(step, message):
    pipeline = InProcessPipeline(Step(step), build("1f1b", 2, 4), call_step)
    with pytest.raises(ValueError, match=message):
        pipeline.run(torch.randn(4, WIDTH), 1)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"schedule": "zb_v"}])
def test_a_fit_of_two_processes_with_kernels_equals_one_device(ranks, options):
    expected = _fit(0, {})
    for found in ranks(2).run(_fit, 2, options):
        assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)


def _fit(num_devices, options):
    record = fits.Record()
    fits.trainer(num_devices, options, max_epochs=1, callbacks=[record]).fit(
        seeded(True), fits.loader()
    )
    return record.losses


OF_TRITON = """
import torch
from examples.benchmarks.gpu_triton import triton_kernels
print(*triton_kernels(torch.device("cpu")), sep="\\n")
"""


@pytest.mark.slow
def test_kernels_of_triton_are_exact():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when a kernel is declared
    subprocess.run([sys.executable, "-c", OF_TRITON], env=environment, check=True)

"""Reads of the device between the blocks: found by the trace, answered by earlier ones."""

import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipeoffload.runtime import PATCHES
from lightning_pipeoffload.runtime.cut import ReadObserver
from lightning_pipeoffload.runtime.step import patching_scalar_reads
from lightning_pipeoffload.schedule import build
from tests.support import fits
from tests.support.families import TEXT, from_transformers
from tests.support.in_process import InProcessPipeline
from tests.support.pairs import slow
from tests.support.small_modules import Step, call_step, linear_blocks, loss_of, through

NUM_MICROBATCHES = 8


class ReadsInF(TorchDispatchMode):
    """Counts what F's read, and what is read when a batch is cut."""

    in_f = in_cut = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            frame, names = sys._getframe(), set()
            while frame is not None:
                names.add(frame.f_code.co_name)
                frame = frame.f_back
            self.in_f += "forward" in names and "agree" not in names
            self.in_cut += "agree" in names
        return func(*args, **(kwargs or {}))


def train(module, schedule, num_ranks, batch):
    """Return the gradients of two steps, the reads of the second, and the pipeline."""
    plan = build(schedule, num_ranks, NUM_MICROBATCHES)
    pipeline = InProcessPipeline(module, plan, call_step)
    pipeline.run(batch, 1)
    with ReadsInF() as reads:
        pipeline.run(batch, 1, seed=1)
    return pipeline.named_gradients(), reads, pipeline


def forget_common(watch):
    watch._values = {}


def compare(monkeypatch, make, schedule, num_ranks, batch):
    """Train with answers and without; return the reads of both, and the pipeline."""
    torch.manual_seed(0)
    found, reads, pipeline = train(make(), schedule, num_ranks, batch)
    monkeypatch.setattr(ReadObserver, "finish", forget_common)
    torch.manual_seed(0)
    expected, plain, _ = train(make(), schedule, num_ranks, batch)
    for name, gradient in expected.items():
        assert (gradient is None) == (found[name] is None)
        assert gradient is None or torch.equal(gradient, found[name])
    return reads, plain, pipeline


class Llama(nn.Module):
    def __init__(self, use_cache):
        super().__init__()
        self.model = from_transformers("LlamaForCausalLM", **TEXT, num_key_value_heads=1)
        self.model.config.use_cache = use_cache

    def step(self, batch):
        return self.model(**batch, labels=batch["input_ids"]).loss


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "use_cache", "is_padded"),
    [
        *map(slow, [(2, 2, True, True), (2, 2, False, False)]),
        *map(slow, [(4, 1, False, False), (4, 2, False, False), (4, 1, True, True)]),
        *map(slow, [(2, 2, False, True), (2, 1, True, False), (4, 2, True, False)]),
    ],
)
def test_reads_of_a_hugging_face_model(monkeypatch, num_ranks, num_stages, use_cache, is_padded):
    schedule = ["zb_h1", "zb_v"][num_stages - 1]
    text = torch.randint(8, (NUM_MICROBATCHES, 6))
    batch = {"input_ids": text} | ({"attention_mask": torch.ones_like(text)} if is_padded else {})
    found, plain, pipeline = compare(
        monkeypatch, lambda: Llama(use_cache), schedule, num_ranks, batch
    )
    before, after = num_ranks * num_stages * NUM_MICROBATCHES, num_ranks * NUM_MICROBATCHES
    if use_cache and not is_padded:
        before, after = 0, 0
    assert (plain.in_f, found.in_f) == (before, after)
    lines = [*pipeline.ranks[0].records.device_reads]
    assert ["masking_utils.py" in line for line in lines] == [True] * bool(before)


# What a step reads, and how often where 2 ranks have 2 stages each and 8 microbatches come


def of_the_batch(m, x):
    return loss_of(m, through(m.blocks, x if x.sum() > 0 else -x))


def of_a_constant(m, x):
    positions = torch.arange(x.shape[-1])
    return loss_of(m, through(m.blocks, x * positions.diff().sum().item()))


def of_a_literal(m, x):
    return loss_of(m, through(m.blocks, x if bool(torch.tensor([True, False]).any()) else -x))


def in_a_loop(m, x):
    for row in torch.eye(3):
        x = x * float(row.sum())
    return loss_of(m, through(m.blocks, x))


def of_a_constant_in_a_step_that_counts(m, x):
    m.count = getattr(m, "count", 0) + 1
    return loss_of(m, through(m.blocks, x * float(torch.ones(2).sum() * m.count)))


def of_a_buffer(m, x):
    return loss_of(m, through(m.blocks, x if m.scale > 0 else -x))


def of_a_constant_by_a_buffer(m, x):
    return loss_of(m, through(m.blocks, x * float(torch.full((2,), m.scale.item()).sum())))


def of_a_constant_by_the_batch(m, x):
    scale = 1.0 if x.mean().item() > 0 else 2.0
    return loss_of(m, through(m.blocks, x * float(torch.full((2,), scale).sum())))


def of_a_constant_by_numpy(m, x):
    scale = 1.0 if np.asarray(x).mean() > 0 else 2.0
    return loss_of(m, through(m.blocks, x * float(torch.full((2,), scale).sum())))


def at_random(m, x):
    return loss_of(m, through(m.blocks, x * float(torch.rand(()))))


def of_what_a_buffer_was_written_into(m, x):
    ones = torch.ones(2)
    view = ones[:1]
    view.add_(m.scale)
    return loss_of(m, through(m.blocks, x * float(ones.sum())))


def after_a_block(m, x):
    x = m.blocks[0](x)
    x = through(m.blocks[1:], x * float(torch.ones(2).sum()))
    return loss_of(m, x)


def nowhere(m, x):
    return loss_of(m, through(m.blocks, x))


class Counting(Step):
    def __init__(self, function):
        super().__init__(function, linear_blocks(8))
        self.register_buffer("scale", torch.tensor(2.0))


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (of_the_batch, 16),
        (of_a_constant, 16),
        (of_a_literal, 16),
        (in_a_loop, 48),
        (of_a_constant_in_a_step_that_counts, 16),
        (of_a_buffer, 32),
        (of_a_constant_by_a_buffer, 64),
        (of_a_constant_by_the_batch, 32),
        (of_a_constant_by_numpy, 16),
        (at_random, 32),
        (of_what_a_buffer_was_written_into, 32),
        (after_a_block, 16),
        (nowhere, 0),
    ],
)
def test_what_is_the_same_is_read_once(monkeypatch, step, expected):
    x = torch.randn(NUM_MICROBATCHES, 4)
    found, plain, _ = compare(monkeypatch, lambda: Counting(step), "zb_v", 2, x)
    assert found.in_f == expected
    assert plain.in_f >= found.in_f


class Warming(Step):
    """Reads a constant in its first steps, and what the batch gives at the same line later."""

    def __init__(self):
        super().__init__(None, linear_blocks(8))
        self.epoch = 0

    def step(self, x):
        scale = x.abs().max() if self.epoch else torch.full((), 2.0)
        return loss_of(self, through(self.blocks, x / scale.item()))


def test_a_line_that_reads_a_constant_may_read_each_microbatch_later():
    x, gradients = torch.randn(NUM_MICROBATCHES, 4), []
    for schedule, num_ranks in (("zb_v", 2), ("1f1b", 1)):
        torch.manual_seed(0)
        module = Warming()
        pipeline = InProcessPipeline(
            module, build(schedule, num_ranks, NUM_MICROBATCHES), lambda m, x: m.step(x)
        )
        pipeline.run(x, 1)
        module.epoch = 1
        pipeline.run(x, 1, seed=1)
        gradients.append(pipeline.named_gradients())
    first, second = gradients
    for name, gradient in first.items():
        assert gradient is None or torch.allclose(gradient, second[name])


def test_nothing_of_torch_is_replaced_where_nothing_is_answered():
    PATCHES.close()  # pipelines of other tests may be alive
    train(Counting(of_a_buffer), "zb_v", 2, torch.randn(NUM_MICROBATCHES, 4))
    assert not {"__bool__", "item"} & vars(Tensor).keys()


def test_torch_gets_back_what_others_have_put_there(monkeypatch):
    monkeypatch.setattr(Tensor, "item", Tensor.item, raising=False)
    others = vars(Tensor)["item"]
    with patching_scalar_reads():
        assert vars(Tensor)["item"] is not others
    assert vars(Tensor)["item"] is others
    assert "__bool__" not in vars(Tensor)


def values_of(x):
    return x.tolist(), x.numpy(), x.cpu()


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        return x if x.sum() > 0 else x[x.isnan()].sum() + x


def of_each_kind(m, x):
    values_of(x)
    x = through(m.blocks, x[x[:, 0] < 9])
    loss = loss_of(m, x)
    return loss if loss > 0 else -loss


def test_each_line_that_reads_is_recorded_once():
    pipeline = InProcessPipeline(
        Step(of_each_kind, [Reading() for _ in range(4)]), build("1f1b", 2, 4), call_step
    )
    pipeline.run(torch.randn(4, 4), 1)
    found = pipeline.ranks[0].records.device_reads
    parts = [(part, line.rpartition(": ")[2]) for line, part in found.items()]
    assert parts == [
        ("before blocks.0", "return x.tolist(), x.numpy(), x.cpu()"),
        ("before blocks.0", "x = through(m.blocks, x[x[:, 0] < 9])"),
        ("in blocks.0", "return x if x.sum() > 0 else x[x.isnan()].sum() + x"),
        ("after the blocks", "return loss if loss > 0 else -loss"),
    ]


class ReadingNet(fits.Net):
    def loss(self, batch):
        if batch["x"].min() < 0:
            raise ValueError("no token is negative")
        return super().loss(batch) * float(torch.ones(2).sum())


@pytest.mark.parametrize("schedule", ["zb_v", slow("zb_h1")])
def test_a_fit_of_two_processes_with_reads_equals_one_device(ranks, schedule):
    expected, _ = _fit(0, schedule)
    for losses, reads in ranks(2).run(_fit, 2, schedule):
        assert losses == pytest.approx(expected, rel=1e-10, abs=1e-12)
        assert reads[0]["part"] == "before blocks.0"
        assert {read["part"] for read in reads[1:]} == {"after the blocks"}  # a metric's too


def _fit(num_devices, schedule):
    torch.manual_seed(7)
    record, module = fits.Record(), ReadingNet(dropout=0.0, depth=4)
    trainer = fits.trainer(num_devices, {"schedule": schedule}, max_epochs=1, callbacks=[record])
    trainer.fit(module, fits.loader())
    return record.losses, trainer.strategy.report()["device_reads"] if num_devices else None

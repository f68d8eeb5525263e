"""What steps write outside of the blocks is what the plain module writes, over the microbatches."""

import copy

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.runtime.microbatch import split_batch
from lightning_pipeoffload.schedule import build
from tests.support.pairs import pairs
from tests.support.small_modules import Regression, call_step, linear_blocks

SCHEDULES = ["zb_h1", "interleaved_1f1b", "zb_v"]


class Writing(Regression):
    """Writes before its blocks; the loss has all of it."""

    def __init__(self, write):
        super().__init__(linear_blocks(4))
        self.write = write
        self.bias = nn.Parameter(torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mean", torch.zeros(4))
        self.plain = torch.zeros(())
        self.count, self.seen, self.table = 0, [], {"calls": [0]}

    def step(self, x):
        self.write(self, x)
        seen = self.count + len(self.seen) + self.plain + self.table["calls"][0]
        loss = super().step(x * self.scale + self.mean) * self.scale + self.bias
        return loss * (1 + seen)

    def written(self):
        return [self.count, self.seen, self.table, self.plain]


def writes_buffers_in_place(module, x):
    module.scale.mul_(1.5)
    module.mean.copy_(x.mean(0))


def assigns_buffers(module, x):
    module.scale = module.scale * 1.5
    module.mean = module.mean / 2 + x.mean(0)


def writes_attributes(module, x):
    module.count += 1
    module.seen.append(len(module.seen))
    module.table["calls"][0] += 1
    module.plain += 1


def makes_an_attribute(module, x):
    module.num_calls = getattr(module, "num_calls", 0) + 1
    module.count = module.num_calls


WRITES = [writes_buffers_in_place, assigns_buffers, writes_attributes, makes_an_attribute]


def run_both(module, schedule, num_ranks, num_steps=2):
    """Run steps of 4 microbatches; return the pipeline and the plain module after them."""
    module, x = module.double(), torch.randn(8, 4).double()
    pipeline = InProcessPipeline(module, build(schedule, num_ranks, 4), call_step)
    plain = copy.deepcopy(module)
    for _ in range(num_steps):
        losses, expected = pipeline.run(x, 2), []
        for part in split_batch(x, 2):
            expected.append(call_step(plain, part))
            (expected[-1] / 4).backward()
        torch.testing.assert_close(losses, [loss.detach() for loss in expected])
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    torch.testing.assert_close(pipeline.named_gradients(), gradients)
    return pipeline, plain


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_writes_before_the_blocks_count_once_for_each_microbatch(write, schedule, num_ranks):
    pipeline, plain = run_both(Writing(write), schedule, num_ranks)
    for rank in pipeline.ranks:
        assert rank.module.written() == plain.written()
        torch.testing.assert_close(dict(rank.module.named_buffers()), dict(plain.named_buffers()))


class Averaging(Regression):
    """Averages what comes before or out of a block, in a buffer, and counts."""

    def __init__(self, place, assigns):
        super().__init__(linear_blocks(4))
        self.place, self.assigns, self.count = place, assigns, 0
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            self.note(x, index)
            x = block(x)
        self.note(x, 4)
        return self.head(x)

    def note(self, x, place):
        if place == self.place:
            self.count += 1
            mean = self.mean / 2 + x.detach().mean(0)
            if self.assigns:
                self.mean = mean
            else:
                self.mean.copy_(mean)


@pytest.mark.parametrize(
    ("place", "assigns", "schedule"),
    pairs([0, 2, 4] * 2, [False, True], [*SCHEDULES, *SCHEDULES[1:], SCHEDULES[0]]),
)
def test_a_buffer_of_what_a_stage_computes_is_saved_from_that_stage(place, assigns, schedule):
    pipeline, plain = run_both(Averaging(place, assigns), schedule, 2)
    saver = pipeline.ranks[pipeline.ranks[0].tensors.owner_of("mean")].module
    torch.testing.assert_close(saver.state_dict()["mean"], plain.mean)
    last = next(rank for rank in pipeline.ranks if max(rank.stages) == len(rank.partition) - 1)
    assert last.module.count == plain.count


def test_what_is_written_between_steps_counts_for_every_stage():
    pipeline, _ = run_both(Writing(writes_attributes), "zb_v", 1)
    (rank,) = pipeline.ranks
    rank.module.count, rank.module.seen = 0, []
    pipeline.run(torch.randn(8, 4).double(), 2)
    assert rank.module.written()[:2] == [4, [0, 1, 2, 3]]


OLD, NEW = nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm


class Named(Regression):
    """Finds its layers by name."""

    def __getitem__(self, name):
        return getattr(self, name)


@pytest.mark.parametrize(
    ("norm", "where", "way"),
    pairs(
        [OLD, NEW],
        ["embed", "blocks", "head"] * 2,
        [("zb_h1", 2, True), ("1f1b", 3, False), ("zb_v", 1, True), ("zb_h1", 2, True)],
    ),
)
def test_what_is_written_as_out_is_saved_from_where_it_is(norm, where, way):
    schedule, num_ranks, trains = way
    model = Named([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)])
    for layer in [block[0] for block in model.blocks] if where == "blocks" else [model[where]]:
        norm(layer)
    pipeline, plain = run_both(model.train(trains), schedule, num_ranks)
    for name, expected in plain.state_dict().items():
        saver = pipeline.ranks[pipeline.ranks[0].tensors.owner_of(name)].module
        torch.testing.assert_close(saver.state_dict()[name], expected)

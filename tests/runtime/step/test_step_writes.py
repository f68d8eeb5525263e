"""What steps write is what the plain module writes, and backwards find what their forwards saw."""

import copy
import weakref
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.users_code import (
    PlaceholderError,
    copy_batch,
    fingerprint,
    is_unchanged,
)
from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.pairs import pairs
from tests.support.small_modules import Regression, call_step, compare_with_plain, linear_blocks

PIPELINES = [("zb_v", 1), ("interleaved_1f1b", 2), ("zb_h1", 3), ("zb_v", 2), ("1f1b", 1)]


def batches(count=2):
    return [torch.randn(8, 4).double() for _ in range(count)]


class Writing(Regression):
    """Writes at one of its places: 0 before the blocks, 2 between them, 4 after; reads there."""

    def __init__(self, write, place=0):
        super().__init__(linear_blocks(4))
        self.write, self.place = write, place
        self.bias = nn.Parameter(torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mean", torch.zeros(4))
        self.plain, self.kept = torch.zeros(()), torch.ones(4)
        self.count, self.seen, self.table = 0, [], {"calls": [0], "kept": torch.ones(4)}

    def step(self, x):
        x = self.embed(self.note(x, 0))
        for index, block in enumerate(self.blocks):
            x = block(self.note(x, index) if index else x)
        loss = self.head(self.note(x, 4)).pow(2).mean()
        return loss * self.scale + self.bias if self.place == 0 else loss

    def note(self, x, place):
        if place != self.place:
            return x
        self.write(self, x.detach())
        x = x * self.scale * self.kept * self.table["kept"] + self.mean
        return x * (1 + self.count + len(self.seen) + self.plain + self.table["calls"][0])

    def written(self):
        return [self.count, self.seen, self.table["calls"], self.plain]


class Stateful(Regression):
    """Keeps what each block has computed, from one call of the step to the next."""

    def step(self, x):
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = block(x + getattr(self, f"state{index}", 0.0))
            setattr(self, f"state{index}", x.detach())
        return x.pow(2).mean()


def test_an_attribute_that_only_later_stages_make_is_not_absent():
    module = Stateful(linear_blocks(4)).double()
    with pytest.raises(PlaceholderError, match="self.state1 is written .*stage 0 does not run"):
        compare_with_plain(module, "zb_h1", 2, batches())


def writes_buffers_in_place(module, x):
    module.scale.mul_(1.5)
    module.mean.copy_(module.mean / 2 + x.mean(0))


def writes_their_data(module, x):
    module.scale.data.mul_(0.9)
    module.kept.data.mul_(0.9)
    module.table["kept"].data.mul_(0.9)


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


WRITES = [
    writes_buffers_in_place, writes_their_data, assigns_buffers, writes_attributes,
    makes_an_attribute,
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "num_ranks"), PIPELINES)
@pytest.mark.parametrize("write", WRITES)
def test_writes_before_the_blocks_count_once_for_each_microbatch(write, schedule, num_ranks):
    pipeline, plain = compare_with_plain(Writing(write).double(), schedule, num_ranks, batches())
    for rank in pipeline.ranks:
        assert rank.module.written() == plain.written()
        torch.testing.assert_close(dict(rank.module.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize(
    ("place", "write", "pipeline"), pairs([2, 4] * 4, WRITES[:4], PIPELINES[1:4])
)
def test_what_a_later_stage_writes_is_saved_from_that_stage(place, write, pipeline):
    pipeline, plain = compare_with_plain(Writing(write, place).double(), *pipeline, batches())
    saver = pipeline.ranks[pipeline.ranks[0].tensors.owner_of("mean")].module
    torch.testing.assert_close(saver.state_dict()["mean"], plain.mean)
    last = next(rank for rank in pipeline.ranks if max(rank.stages) == len(rank.cut.stages) - 1)
    assert last.module.written() == plain.written()


def test_what_is_written_between_steps_counts_for_every_stage():
    pipeline, plain = compare_with_plain(Writing(writes_attributes).double(), "zb_v", 1, batches())
    for module in (pipeline.ranks[0].module, plain):
        module.count, module.seen = 0, []
    (batch,) = batches(1)
    expected = [call_step(plain, part).detach() for part in batch.split(2)]
    torch.testing.assert_close(pipeline.run(batch, 2), expected)
    assert pipeline.ranks[0].module.written() == plain.written()


class Cache:
    """What a step makes if it is not there."""


class Caching(Regression):
    def __init__(self):
        super().__init__(linear_blocks(4))

    def step(self, x):
        if not hasattr(self, "cache"):
            self.cache = Cache()
        return super().step(x)


def test_what_a_pass_makes_for_later_ones_is_held_as_long_as_the_module_has_it():
    pipeline, caches = InProcessPipeline(Caching().double(), build("zb_v", 1, 4), call_step), []
    module = pipeline.ranks[0].module
    for batch in batches(3):
        pipeline.run(batch, 2)
        caches.append(weakref.ref(module.cache))
        del module.cache
    assert [cache() is None for cache in caches] == [True, True, False]


class Unread(list):
    """A list that nothing may read through once it is long, as an epoch's list of losses."""

    def __iter__(self):
        assert len(self) <= 64
        return super().__iter__()

    def copy(self):
        return Unread([*self])


class Gathering(Regression):
    """Keeps something of each microbatch after its blocks until the epoch's end."""

    def __init__(self, keep):
        super().__init__(linear_blocks(4))
        self.keep, self.index = keep, 0
        self.outs, self.table, self.seen = Unread(), {"train": Unread()}, set()
        self.last, self.long = deque(maxlen=5), [0] * 100

    def step(self, x):
        loss = super().step(x)
        self.index += 1
        self.keep(self, loss.detach())
        return loss

    def kept(self):
        lists = list.copy(self.outs), list.copy(self.table["train"])
        return [*lists, sorted(self.seen), list(self.last), self.long]


KEEPS = {
    "losses": lambda module, loss: module.outs.append(loss),
    "nested": lambda module, loss: module.outs.append([loss]),
    "in_dict": lambda module, loss: module.table["train"].append(loss),
    "of_dicts": lambda module, loss: module.outs.append({"loss": loss}),
    "sometimes": lambda module, loss: module.outs.extend([loss] * 9 * (module.index % 7 == 1)),
    "later": lambda module, loss: module.outs.extend([loss] * (module.index > 8)),
    "sorted": lambda module, loss: module.long.append(float(loss)) or module.long.sort(),
    "replaced": lambda module, loss: module.long.__setitem__(module.index % 100, loss),
    "set": lambda module, loss: module.seen.add(module.index),
    "deque": lambda module, loss: module.last.append(loss),
}


@pytest.mark.parametrize(
    ("keep", "pipeline"), pairs([*KEEPS], [("zb_v", 1), ("zb_h1", 2), ("zb_v", 2)])
)
def test_what_grows_until_the_epochs_end_is_exact_and_not_read_through(keep, pipeline):
    module = Gathering(KEEPS[keep]).double()
    pipeline, plain = compare_with_plain(module, *pipeline, batches(20))
    last = next(rank for rank in pipeline.ranks if max(rank.stages) == len(rank.cut.stages) - 1)
    torch.testing.assert_close(last.module.kept(), plain.kept())


class Recounting(Regression):
    """Changes entries of a long list, which only the end of the trace compares at first."""

    def __init__(self, place):
        super().__init__(linear_blocks(4))
        self.place, self.long = place, [0.0] * 2000
        self.static = [{"id": index} for index in range(2000)]

    def step(self, x):
        x = self.embed(self.note(x, 0))
        for block in self.blocks:
            x = block(x)
        return self.head(self.note(x, 4)).pow(2).mean()

    def note(self, x, place):
        if place == self.place:
            self.long[7] += 1
            x = x * self.long[7]
        return x


@pytest.mark.parametrize(
    ("place", "pipeline"), pairs([0, 4] * 2, [("zb_v", 1), ("zb_h1", 2), ("zb_v", 2)])
)
def test_an_entry_of_a_long_list_is_written_where_the_line_is(place, pipeline):
    pipeline, plain = compare_with_plain(Recounting(place).double(), *pipeline, batches())
    for rank in pipeline.ranks if place == 0 else pipeline.ranks[-1:]:
        (record,) = rank.records.by_key.values()
        assert {(w.variable.label, w.point.segment) for w in record.writes.attributes} == {
            ("self.long", place)
        }
        assert rank.module.long == plain.long


# Weights and buffers that are written where a backward reads them


class Block(nn.Linear):
    """Writes what it computes with, each time."""

    def __init__(self, write):
        super().__init__(4, 4)
        self.write = write
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        self.write(self)
        return (super().forward(x) * self.scale).tanh()


class Head(Regression):
    """Writes its head after its blocks."""

    def __init__(self, write):
        super().__init__(linear_blocks(2))
        self.head = Block(write)


@torch.no_grad()
def scales(block):
    block.weight.mul_(0.9)


@torch.no_grad()
def clamps(block):
    block.weight.clamp_(-0.3, 0.3)


def scales_data(block):
    block.weight.data.mul_(0.9)


def gives_new_data(block):
    block.weight.data = block.weight.data * 0.9


def scales_buffer(block):
    block.scale.mul_(0.9)


def scales_buffer_data(block):
    block.scale.data.mul_(0.9)


IN_BLOCKS = [
    (scales_data, "zb_h1", 3, "none"),
    (scales_data, "zb_v", 1, "full"),
    (scales, "zb_v", 2, "none"),
    (scales, "zb_h1", 1, "full"),
    (clamps, "zb_h1", 3, "full"),
    (scales_buffer, "zb_h1", 3, "none"),
    (scales_buffer_data, "zb_v", 1, "none"),
    (scales_buffer_data, "zb_h1", 2, "full"),
]
AFTER = [scales_data, scales, gives_new_data, clamps, scales_buffer, scales_buffer_data]


@pytest.mark.parametrize(("write", "schedule", "num_ranks", "recompute"), IN_BLOCKS)
def test_a_block_may_write_what_it_computes_with(write, schedule, num_ranks, recompute):
    module = Regression([Block(write) for _ in range(6)]).double()
    compare_with_plain(module, schedule, num_ranks, batches(3), recompute=recompute)


@pytest.mark.parametrize("write", AFTER)
def test_a_step_may_write_what_it_computes_with_after_the_blocks(write):
    compare_with_plain(Head(write).double(), "gpipe", 2, batches(3))


def test_casts_of_a_weight_that_is_written_are_not_shared():
    module, x = Head(scales_data), torch.randn(8, 4)
    plain, expected = copy.deepcopy(module), []
    pipeline = InProcessPipeline(module, build("1f1b", 2, 4), call_step)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        losses = pipeline.run(x, 2)
    for part in x.split(2):
        with torch.autocast("cpu", torch.bfloat16):
            expected.append(call_step(plain, part).detach())
    torch.testing.assert_close(losses, expected)


@pytest.mark.parametrize(("schedule", "num_ranks"), [("zb_h1", 2), ("zb_v", 2)])
def test_a_buffer_that_only_later_steps_write_in_place_is_refused_by_name(schedule, num_ranks):
    writes = []
    module = Regression([Block(lambda block: [write(block) for write in writes]) for _ in range(4)])
    pipeline = InProcessPipeline(module, build(schedule, num_ranks, 4), call_step)
    pipeline.run(torch.randn(8, 4), 2)
    writes.append(lambda block: setattr(block, "scale", block.scale * 0.9))  # no write in place
    pipeline.run(torch.randn(8, 4), 2)
    writes[:] = [scales_buffer]
    with pytest.raises(RuntimeError, match=r"writes the buffer blocks\.\d\.scale in place, which"):
        pipeline.run(torch.randn(8, 4), 2)


# Batches that a step changes: once for each microbatch, as on one device


@dataclass
class Batch:
    x: torch.Tensor
    extras: dict = field(default_factory=dict)


def replaces(batch):
    batch["x"] = batch["x"] / 2
    return batch["x"]


def adds_a_key(batch):
    batch["n"] = batch.get("n", 0) + 1
    return batch["x"] * batch["n"]


def pops(batch):
    return batch["x"] * batch.pop("scale", 1.0).mean()


def appends(batch):
    batch["inside"].append(batch["x"] / len(batch["inside"]))
    return batch["inside"][-1]


def writes_into_a_dataclass(batch):
    batch["record"].x.mul_(3)
    batch["record"].extras["n"] = len(batch["record"].extras)
    return batch["record"].x + batch["record"].extras["n"]


CHANGES = [
    lambda batch: batch["x"].div_(2), replaces, adds_a_key, pops, appends, writes_into_a_dataclass,
    lambda batch: batch["x"].requires_grad_(),
]  # fmt: skip


class Changing(Regression):
    """The loss has what was changed too, after the blocks."""

    def __init__(self, change):
        super().__init__(linear_blocks(6))
        self.change = change

    def step(self, batch):
        return (self(self.change(batch)) - batch["x"].mean()).pow(2).mean()


def batch_of(x):
    inside, scale = [x.clone() * 2, x.clone()], torch.rand(8).double()
    return {"x": x, "scale": scale, "inside": inside, "record": Batch(x.clone())}


@pytest.mark.parametrize(("change", "pipeline"), pairs(CHANGES, PIPELINES))
def test_a_change_of_the_batch_is_made_once(change, pipeline):
    compare_with_plain(Changing(change).double(), *pipeline, list(map(batch_of, batches())))


@pytest.mark.parametrize("schedule", ["zb_v", "zb_h1"])
def test_hooks_find_the_change_in_the_batch_once(schedule):
    x = torch.randn(8, 4)
    batch = {"x": x.clone()}
    InProcessPipeline(Changing(CHANGES[0]), build(schedule, 1, 4), call_step).run(batch, 2)
    torch.testing.assert_close(batch["x"], x / 2)


def test_what_is_one_tensor_for_all_is_changed_for_each_microbatch_alone():
    def change(batch):
        batch["scale"].mul_(2)
        return batch["x"] * batch["scale"]

    module, x = Changing(change), torch.randn(1, 4).expand(8, 4)
    expected = call_step(module, {"x": x, "scale": torch.ones(1)}).detach()
    pipeline = InProcessPipeline(module, build("zb_v", 1, 4), call_step)
    losses = pipeline.run({"x": x, "scale": torch.ones(1)}, 2)
    torch.testing.assert_close(losses, [expected] * 4)


def test_copies_of_a_batch_have_its_form_and_identities():
    tensor = torch.ones(2)
    value = {"a": tensor, "b": [tensor, (tensor, "text")], "c": Batch(tensor)}
    copied = copy_batch(value)
    assert copied["a"] is copied["b"][0] is copied["b"][1][0] is copied["c"].x is not tensor
    before = fingerprint(copied)
    assert is_unchanged(before, fingerprint(copied))
    copied["c"].x.add_(1)
    assert not is_unchanged(before, fingerprint(copied))
    assert value["a"].sum() == 2


def test_a_masked_constant_of_numpy_has_a_fingerprint():
    held = [np.ma.masked, np.arange(3)]
    before = fingerprint(held)
    assert is_unchanged(before, fingerprint(held))
    held[1][0] = 7
    assert not is_unchanged(before, fingerprint(held))


class Fills(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), seen

    def forward(self, x):
        x = self.linear(x).tanh()
        self.seen.append(x.pow(2).mean())
        return x


class HasTheListToo(Regression):
    def __init__(self, num_filling=4):
        seen = []
        super().__init__(Fills(seen if block < num_filling else []) for block in range(4))
        self.seen = seen
        self.double()

    def step(self, x):
        self.seen.clear()
        return super().step(x) + sum(self.seen)


def test_a_list_of_the_module_and_its_blocks_is_refused_where_a_rank_has_several_stages():
    module = HasTheListToo()
    compare_with_plain(module, "zb_h1", 2, batches(1))
    pipeline = InProcessPipeline(module, build("zb_v", 2, 4), call_step)
    with pytest.raises(ValueError, match=r"self\.blocks\.0\.seen and self\.seen are one list, w"):
        pipeline.run(batches(1)[0], 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_refuse_a_list_that_several_stages_of_one_rank_have(rank):
    schedule = build("interleaved_1f1b", 2, 4)
    pipeline = InProcessPipeline(HasTheListToo(num_filling=1), schedule, call_step)
    pipeline.ranks = [pipeline.ranks[rank]]
    with pytest.raises(ValueError, match=r"self\.blocks\.0\.seen and self\.seen are one list, w"):
        pipeline.run(batches(1)[0], 2)


@pytest.mark.parametrize("write", WRITES)
def test_what_forwards_that_run_again_have_written_is_put_back(write):
    torch.manual_seed(0)
    pipeline = InProcessPipeline(Writing(write).double(), build("1f1b", 1, 2), call_step)
    batch = batches(1)[0]
    pipeline.run(batch, 4)
    (rank,) = pipeline.ranks
    before = copy.deepcopy(rank.module.state_dict()), copy.deepcopy(rank.module.written())
    restore = rank.stages[0].save_written_state()
    pipeline.run(batch, 4)
    restore()
    after = rank.module.state_dict(), rank.module.written()
    torch.testing.assert_close(after, before, rtol=0, atol=0)

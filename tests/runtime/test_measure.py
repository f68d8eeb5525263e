"""Costs of stages, speeds of copies, and bytes that stages keep."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipeoffload.demos import GPT
from lightning_pipeoffload.planning.memory_needs import MemoryNeeds
from lightning_pipeoffload.runtime import tensors_in
from lightning_pipeoffload.runtime.cut import CutSettings, Stage
from lightning_pipeoffload.runtime.device import make_lanes
from lightning_pipeoffload.runtime.measure import (
    BlockMeasurement,
    CopySpeed,
    RankCosts,
    SampledCut,
    SliceCosts,
    StageCosts,
    costs_of_blocks,
    costs_of_pipelines,
    costs_of_stages,
    measure_copy_speed,
    measure_saved_memory,
    overhead_of_actions,
)
from lightning_pipeoffload.runtime.memory import (
    BytesForLaterSlices,
    HeldBytes,
    HostMemory,
    OffloadSettings,
)
from lightning_pipeoffload.runtime.run import (
    ActivationMemory,
    Executor,
    Pipeline,
    split_into_microbatches,
)
from lightning_pipeoffload.schedule import (
    UNMEASURED,
    Action,
    Costs,
    Kind,
    build,
    offload_activations,
    peak_memory,
)
from lightning_pipeoffload.schedule.simulation import peak_host_memory
from tests.runtime.step.test_autocast import CountCasts
from tests.support.families import FAMILIES, Task, call_step
from tests.support.in_process import InProcessPipeline, InProcessTransport
from tests.support.pairs import slow
from tests.support.small_modules import Regression, linear_blocks

CPU = torch.device("cpu")


def costs(*actions):
    """Costs of stages, by the lengths of their F, B and W."""
    forward, for_input, for_weight = zip(*actions, strict=True)
    return Costs(forward, for_input, for_weight)


def measured(lengths, overhead=2.0):
    return costs(*[[length + overhead] * 3 for length in lengths])


def cut(*lengths):
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    return [
        Stage(index, range(end - length, end), frozenset(range(end - length, end)))
        for index, (end, length) in enumerate(zip(ends, lengths, strict=True))
    ]


def costs_of_rank(index, seconds, num_bytes):
    stage = StageCosts(*[seconds] * 3, *[num_bytes] * 3, seconds, seconds)
    return RankCosts(
        {index: [SliceCosts(stage, BytesForLaterSlices())]}, num_bytes, {index: seconds}
    )


def test_all_pipelines_cost_what_the_largest_does():
    of_all = costs_of_pipelines(
        [
            [costs_of_rank(0, 1.0, 8), costs_of_rank(1, 4.0, 1)],
            [costs_of_rank(0, 2.0, 4), costs_of_rank(1, 3.0, 2)],
        ]
    )
    assert of_all.per_stage("forward", 2) == of_all.per_stage("communication", 2) == (2.0, 4.0)
    assert of_all.per_stage("activation", 2) == (8, 2)
    assert of_all.copy_lanes == 1


def test_blocks_are_measured_with_the_casts_that_a_step_shares():
    module = Regression(linear_blocks(4))
    pipeline = Pipeline(module, 0, CutSettings((0, 0)), CPU)

    def cut_batch():
        batch = torch.randn(4, 4)
        return split_into_microbatches(pipeline, batch, 1, lambda x, _: module.step(x), "train", 0)

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), CountCasts() as casts:
        cut_batch()  # the first cut, block by block of which is measured
        trial = BlockMeasurement(pipeline, InProcessTransport(), range(4))
        trial.measure(cut_batch, "none", CopySpeed(1.0, 1.0, 1.0))
        once = [sum(cast is own for cast in casts.weights) for own in module.parameters()]
        module.embed(torch.randn(4, 4))
    assert once == [1] * 12
    assert casts.weights[-1] is module.embed.weight  # none of the casts is kept
    pipeline.detach()


def test_a_record_whose_shapes_have_run_is_kept_so_that_no_other_has_its_id():
    module = Regression(linear_blocks(4))
    pipeline = Pipeline(module, 0, CutSettings((0, 0)), CPU)

    def cut_batch():
        return split_into_microbatches(
            pipeline, torch.randn(4, 4), 1, lambda x, _: module.step(x), "train", 0
        )

    measured = weakref.ref(cut_batch()[0].record)
    trial = BlockMeasurement(pipeline, InProcessTransport(), range(4))
    trial.measure(cut_batch, "none", CopySpeed(1.0, 1.0, 1.0))
    pipeline.records.forget()
    cut_batch()
    gc.collect()
    assert measured() is not None
    del trial
    gc.collect()
    assert measured() is None
    pipeline.detach()


def test_the_ledgers_peak_and_the_devices_are_of_the_same_steps(monkeypatch):
    device = {"now": 0, "peak": 700}  # of what ran before

    def reset(_):
        device["peak"] = device["now"]

    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda _: device["peak"])
    settings = OffloadSettings(torch.device("cuda"), make_lanes(CPU), HostMemory(pinned=False))
    memory = ActivationMemory(settings)
    memory.reset_peaks()
    device.update(now=100, peak=250)
    memory.ledger.record(Action(Kind.F, 0, 0), HeldBytes(150))
    assert memory.peak_without_activations == 100


def test_the_overhead_of_an_action_counts_once_in_a_stage():
    blocks, first_cut = measured([1, 3, 5, 7]), measured([4, 12])
    overhead = overhead_of_actions(blocks, 4, first_cut, 2)
    assert set(overhead.values()) == {2.0}
    for lengths, expected in (([4], [16]), ([1, 3], [1, 15]), ([1, 1, 1, 1], [1, 3, 5, 7])):
        stages = costs_of_stages(blocks, cut(*lengths), overhead)
        assert stages.per_stage("backward_input", len(lengths)) == pytest.approx(
            [length + 2 for length in expected]
        )


def test_a_measurement_that_is_off_makes_no_action_shorter_than_its_blocks():
    blocks = measured([1, 3, 5, 7])
    assert set(overhead_of_actions(blocks, 4, measured([9, 20]), 2).values()) == {0.0}
    assert set(overhead_of_actions(blocks, 4, measured([0, 0], 0.0), 2).values()) == {3.0}


@pytest.mark.parametrize(
    ("classes", "ranks", "stages", "sample_of"),
    [
        ("abbbbc", "000111", ["0", "1", "2", "3", "4", "5"], "012345"),
        ("abbbbbbc", "00001111", ["0", "1", "23", "4", "56", "7"], "01113335"),
        ("bbbbbbbb", "00110011", ["0", "1", "2", "3", "45", "67"], "01230022"),
        ("ababcaba", "00000000", ["0", "1", "23", "4", "567"], "01013010"),
    ],
    ids=["few", "ends", "chunks", "three"],
)
def test_each_rank_measures_each_class_of_its_blocks(classes, ranks, stages, sample_of):
    found = SampledCut.of(classes, ranks)
    assert ["".join(map(str, blocks)) for blocks in found.stages] == stages
    assert "".join(map(str, found.sample_of)) == sample_of


def expected_stages(sampled, of_block, overhead):
    return [sum(of_block[block] for block in blocks) + overhead for blocks in sampled.stages]


def test_blocks_of_each_class_and_rank_cost_what_their_sample_does():
    sampled = SampledCut.of("abbcbbcbabbbbbbb", [0] * 8 + [1] * 8)
    lengths = {"a": 5, "b": 3, "c": 7}
    of_block = [lengths[c] * (1 + i // 8) for i, c in enumerate("abbcbbcbabbbbbbb")]
    stages = measured(expected_stages(sampled, of_block, 2.0), 0.0)
    blocks, overhead = costs_of_blocks(sampled, stages, stages, len(sampled.stages))
    assert [*overhead.values()] == pytest.approx([2.0] * 3)
    assert blocks.per_stage("forward", 16) == pytest.approx([length + 2 for length in of_block])


@pytest.mark.parametrize("off", [0.8, 1.2])
def test_a_sample_that_is_off_changes_no_sum(off):
    sampled = SampledCut.of("b" * 24, [0] * 12 + [1] * 12)
    right = expected_stages(sampled, [3.0] * 24, 0.5)
    assert len(right) == 4
    stages = measured([right[0] * off, *right[1:]], 0.0)
    blocks, overhead = costs_of_blocks(sampled, stages, stages, 4)
    halves = costs_of_stages(blocks, cut(12, 12), overhead).per_stage("forward", 2)
    assert halves == pytest.approx([36.5, 36.5], rel=0.05)


def test_both_directions_are_measured():
    speed = measure_copy_speed(torch.device("cpu"), num_bytes=1 << 20)
    assert speed.to_host > 1e6
    assert speed.to_device > 1e6
    assert speed.overlap > 0.1


@pytest.mark.parametrize(
    ("overlap", "lanes", "copy_slowdown"),
    [(0.5, 2, 1.0), (0.75, 2, 1.5), (0.9, 1, 1.0), (1.3, 1, 1.0)],
)
def test_directions_share_a_lane_where_they_slow_each_other(overlap, lanes, copy_slowdown):
    speed = CopySpeed(1.0, 1.0, overlap)
    assert (speed.num_lanes, speed.copy_slowdown) == (lanes, copy_slowdown)


NUM_MICROBATCHES = 4
SAMPLES = 256  # tensors of tiny models would be too small to count


def tokens():
    return torch.randint(0, 64, (8, 32))


def gpt(depth=4, **options):
    sizes = {"vocab_size": 64, "context": 32, "width": 64, "depth": depth, "heads": 2}
    return GPT(**sizes, **options)


class Crossing(nn.Module):
    """A value made outside of the blocks is used after the last one; one block is frozen."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
        self.blocks[1].requires_grad_(False)

    def forward(self, x):
        x = start = self.first(x).tanh()
        for block in self.blocks:
            x = block(x)
        return (x * start.exp()).sum(-1, keepdim=True)


class TwoViews(nn.Module):
    """SimCLR with a projector between the calls, and a residual around the blocks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))
        self.projector = nn.Sequential(nn.Linear(64, 32), nn.Tanh())

    def encode(self, x):
        x = start = self.first(x).tanh()
        for block in self.blocks:
            x = block(x)
        return self.projector(x * start.exp())

    def forward(self, x):
        return self.encode(x) * self.encode(x.flip(-1)).exp()


class Adapted(nn.Module):
    """A frozen layer with an adapter, whose W is short."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 1, bias=False), nn.Linear(1, 64, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def make(name):
    torch.manual_seed(0)
    if name == "adapted":
        blocks = nn.Sequential(*(Adapted() for _ in range(4)))
        return Task(blocks, lambda model, x: model(x).square().mean()), torch.randn(SAMPLES, 64)
    if name.startswith("gpt_"):
        options = {"dropout": 0.1 * ("dropout" in name), "tie_weights": "tied" in name}
        return gpt(10 if "deep" in name else 4, **options), (tokens(), tokens())
    if name == "two_views":
        return Task(TwoViews(), lambda model, x: model(x).square().mean()), torch.randn(SAMPLES, 6)
    if name == "crossing":
        return Task(Crossing(), lambda model, x: model(x).square().mean()), torch.randn(SAMPLES, 6)
    family = FAMILIES[name]
    return family.task(), family.samples(SAMPLES)


@pytest.mark.parametrize(
    ("name", "schedule", "num_ranks", "recompute"),
    [
        ("gpt_dropout", "zb_h1", 2, "none"),
        ("gpt_deep_tied", "zb_h1", 2, "none"),
        ("gpt_deep_dropout", "zb_h1", 2, "full"),
        slow(("gpt_deep_dropout", "zb_h1", 10, "none")),  # each block is a stage
        slow(("gpt_deep_dropout", "zb_h1", 10, "full")),
        ("gpt_tied", "zb_v", 2, "none"),
        ("gpt_plain", "zb_v", 2, "cheap"),
        ("crossing", "interleaved_1f1b", 2, "none"),
        ("two_views", "zb_v", 2, "none"),
        ("two_views", "zb_h1", 2, "cheap"),
        ("llama_checkpointed", "zb_h1", 2, "none"),
        slow(("two_views", "1f1b", 2, "full")),
        slow(("llama_padding_mask", "zb_h1", 3, "cheap")),
        slow(("mixtral", "1f1b", 2, "full")),
        slow(("t5", "zb_h1", 2, "none")),
    ],
)
def test_shapes_tell_what_the_ledger_counts(name, schedule, num_ranks, recompute):
    module, batch = make(name)
    plan = build(schedule, num_ranks, NUM_MICROBATCHES)
    pipeline = InProcessPipeline(module, plan, call_step, recompute=recompute)
    assert_as_counted(pipeline, batch)


@pytest.mark.parametrize(
    ("name", "schedule", "recompute"),
    [
        ("gpt_dropout", "seq_1f1b", "none"),
        slow(("gpt_dropout", "seq_zb", "full")),
        slow(("gpt_deep_tied", "seq_zb", "none")),
        slow(("gpt_deep", "seq_v", "full")),
        slow(("gpt_plain", "seq_v", "cheap")),
        slow(("llama_padding_mask", "seq_zb", "none")),
    ],
)
def test_shapes_tell_what_the_ledger_counts_of_slices(name, schedule, recompute):
    module, batch = make(name)
    plan = build(schedule, 2, NUM_MICROBATCHES, num_sequence_slices=3)
    pipeline = InProcessPipeline(module, plan, call_step, recompute=recompute)
    rank = pipeline.ranks[0]
    size = (len(batch) if torch.is_tensor(batch) else count(batch)) // NUM_MICROBATCHES
    parts = split_into_microbatches(
        rank, batch, size, lambda p, _: call_step(rank.module, p), "train", 0
    )
    costs = MemoryNeeds.of(rank, parts[0]).costs
    pipeline.run(batch, size)
    counted = [executor.memory.ledger.peak_device_bytes for executor in pipeline.executors]
    assert counted == pytest.approx([*peak_memory(pipeline.plan, costs)], rel=1e-9)
    assert min(counted)


class LiveStorages(TorchDispatchMode):
    """The storages that operations have made, until each is freed."""

    def __init__(self):
        super().__init__()
        self._found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage._cdata not in self._found:
                self._found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    @property
    def num_bytes(self):
        self._found = {k: found for k, found in self._found.items() if not found[0].expired()}
        return sum(size for _, size in self._found.values())


@pytest.mark.parametrize("recompute", ["none", slow("full")])
def test_slices_take_the_memory_that_the_ledger_counts(monkeypatch, recompute):
    module, batch = make("gpt_plain")
    plan = build("seq_zb", 1, 2, num_sequence_slices=3)
    pipeline = InProcessPipeline(module, plan, call_step, recompute=recompute)
    size = len(batch[0]) // 2
    pipeline.run(batch, size)  # gradients are there from now on
    taken, execute = {}, Executor.execute

    def look(executor, action):
        execute(executor, action)
        taken[action] = live.num_bytes

    monkeypatch.setattr(Executor, "execute", look)
    with LiveStorages() as live:
        pipeline.run(batch, size)
    ledger = pipeline.executors[0].memory.ledger
    counted = {entry.action: entry.held.device for entry in ledger.entries}
    *_, last = counted
    assert counted[last] == 0
    for action, num_bytes in counted.items():
        if action.microbatch >= 3:  # the first W's have made gradients, and room to check hooks
            extra = taken[action] - taken[last] - num_bytes
            assert abs(extra) < 0.05 * ledger.peak_device_bytes, action


def test_of_alike_blocks_of_a_stage_two_run_and_the_last(monkeypatch):
    module, batch = make("gpt_deep")
    pipeline = InProcessPipeline(module, build("zb_h1", 2, NUM_MICROBATCHES), call_step)
    rank = pipeline.ranks[0]
    parts = split_into_microbatches(
        rank, batch, 2, lambda p, _: call_step(rank.module, p), "train", 0
    )
    ran, attend = [], functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda *args, **options: ran.append(1) or attend(*args, **options),
    )
    measure_saved_memory(rank, parts[0])
    assert len(ran) == 2 + 1 + 2 + 1  # 0 of a class of its own, 1, 2, 5, 6, 9 with the head


def test_shapes_tell_what_the_ledger_counts_of_an_offload():
    module, batch = make("gpt_plain")
    plan, _ = offload_activations(build("zb_v", 2, NUM_MICROBATCHES), UNMEASURED, 0.5)
    pipeline = InProcessPipeline(module, plan, call_step)
    costs = assert_as_counted(pipeline, batch)
    hosts = [executor.memory.ledger.peak_host_bytes for executor in pipeline.executors]
    assert hosts == [*peak_host_memory(pipeline.plan, costs)]
    assert max(hosts)


def test_what_adapters_would_keep_of_a_frozen_base_waits_for_no_w():
    module, batch = make("adapted")
    pipeline = InProcessPipeline(module, build("zb_h1", 2, NUM_MICROBATCHES), call_step)
    costs = assert_as_counted(pipeline, batch)
    assert not any(costs.weight_residue)
    assert not any(costs.backward_weight)


def assert_as_counted(pipeline, batch):
    rank = pipeline.ranks[0]
    size = (len(batch) if torch.is_tensor(batch) else count(batch)) // NUM_MICROBATCHES
    parts = split_into_microbatches(
        rank, batch, size, lambda p, _: call_step(rank.module, p), "train", 0
    )
    found = measure_saved_memory(rank, parts[0])
    pipeline.run(batch, size)
    costs = replace(
        rank.cut.costs,
        activation=[stage.activation_bytes for stage in found],
        weight_input=[stage.weight_input_bytes for stage in found],
        weight_residue=[stage.residue_bytes for stage in found],
    )
    counted = [executor.memory.ledger.peak_device_bytes for executor in pipeline.executors]
    assert counted == [*peak_memory(pipeline.plan, costs)]
    assert min(counted)
    return costs


def count(batch):
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0])

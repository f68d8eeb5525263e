"""Steps whose activations go to the host and come back have the gradients of those that stay."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload.runtime.device import CopyError, CopyLanes, Lane, timing
from lightning_pipeoffload.runtime.memory import (
    ActivationStore,
    HostBudget,
    HostMemory,
    HostMemoryError,
    OffloadSettings,
)
from lightning_pipeoffload.runtime.memory.saved_tensor import WrittenInPlaceError
from lightning_pipeoffload.runtime.run import ActivationMemory
from lightning_pipeoffload.schedule import Costs, MemoryPart, build
from lightning_pipeoffload.schedule.passes import offload_activations
from lightning_pipeoffload.schedule.simulation import peak_host_memory, peak_memory
from tests.support.in_process import InProcessPipeline
from tests.support.offloaded import (
    APART,
    EVERYTHING,
    FOR_B,
    QUEUE,
    FailingLane,
    LastMomentLane,
    memory_of_all,
    offloaded,
)
from tests.support.pairs import first, pairs
from tests.support.small_modules import (
    MODELS,
    DemoGPT,
    Regression,
    call_step,
    linear_blocks,
    run_pipeline,
)

WAYS = [EVERYTHING, APART, FOR_B, QUEUE]


def assert_bit_equal(found, expected):
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=0)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=0, atol=0)


def assert_offload_changes_nothing(module, schedule, batch, ways, size=1, **memory):
    expected = run_pipeline(module, schedule, batch, size)
    plan = offloaded(schedule, ways)
    kept = functools.partial(memory_of_all, **memory)
    assert_bit_equal(run_pipeline(module, plan, batch, size, memory=kept), expected)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_v", "po_f"])
def test_the_bits_are_those_of_activations_that_stay(name):
    module = DemoGPT(depth=4, dropout=0.3, tie_weights=True)
    schedule, batch = build(name, 2, 4), MODELS["gpt"].batch(4)
    assert_offload_changes_nothing(module, schedule, batch, EVERYTHING)


@pytest.mark.parametrize(
    ("name", "size"), first(2, [("1f1b", 2), ("zb_v", 3), ("zb_h1", 3), ("zb_v", 2)])
)
def test_ranks_that_wait_for_copies_have_the_gradients_of_those_that_do_not(name, size):
    """A plan for one activation at a time; copies end at the last moment."""
    module, batch = MODELS["mlp"].make().double(), MODELS["mlp"].batch(4)
    schedule, lanes = build(name, size, 4), CopyLanes(LastMomentLane(), LastMomentLane())
    plan, report = offload_activations(schedule, Costs(1, 1, 1, offload=2, reload=2), "auto", 1)
    assert report.is_paged
    expected = run_pipeline(module, schedule, batch, 1)
    found = run_pipeline(
        module, plan, batch, 1, memory=functools.partial(memory_of_all, lanes=lanes)
    )
    assert_bit_equal(found, expected)
    assert lanes.d2h.num_late > 0


@pytest.mark.parametrize(("ways", "one_lane"), first(2, pairs(WAYS, [True, False])))
def test_copies_that_end_at_the_last_moment_are_waited_for(ways, one_lane):
    module, batch = MODELS["mlp"].make().double(), MODELS["mlp"].batch(2)
    d2h, h2d = LastMomentLane(), LastMomentLane()
    lanes = CopyLanes(d2h, d2h if one_lane else h2d)
    assert_offload_changes_nothing(module, build("zb_h1", 2, 2), batch, ways, lanes=lanes)
    assert lanes.d2h.num_late > 0
    assert lanes.h2d.num_late > 0


class StoppedClock:
    """Time passes while the compute lane waits for a copy, and at no other moment."""

    def __init__(self):
        self.time = 0

    def now(self):
        return self.time

    def seconds(self, start, end):
        return end - start


def test_waits_for_copies_are_not_part_of_what_actions_take(monkeypatch):
    clock = StoppedClock()

    class TimedLane(LastMomentLane):
        def make_compute_wait(self, moment):
            super().make_compute_wait(moment)
            clock.time += 1

    monkeypatch.setattr(timing, "HostClock", lambda: clock)
    memory = functools.partial(memory_of_all, lanes=CopyLanes(TimedLane(), TimedLane()))
    plan = offloaded(build("zb_h1", 2, 4), EVERYTHING)
    pipeline = InProcessPipeline(Regression(linear_blocks(4)), plan, call_step, memory)
    pipeline.run(torch.randn(4, 4), 1)
    assert clock.time > 0
    for executor in pipeline.executors:
        assert set(executor.timer.action_seconds().values()) == {0}


class CarelessLane(LastMomentLane):
    """Lets the compute lane go on without its copies."""

    def make_compute_wait(self, moment):
        pass


def test_a_reload_waits_for_its_own_offload_though_nobody_else_has():
    """Megatron-LM's offload has this race: its issue 7398."""
    memory = memory_of_all(torch.device("cpu"), lanes=CopyLanes(CarelessLane(), LastMomentLane()))
    store, tensor = ActivationStore("", (), memory.settings), torch.arange(8.0)
    saved = store.pack(tensor)
    for step in (store.start_offload, store.free):
        step()
    store.start_reload(MemoryPart.FOR_B)
    store.wait_for_reload(MemoryPart.FOR_B)
    assert torch.equal(store.unpack(saved), tensor)


@pytest.mark.parametrize(("ways", "recompute"), first(2, pairs(WAYS, ["cheap", "full"])))
def test_together_with_recompute(ways, recompute):
    module, batch = DemoGPT(depth=4, dropout=0.3, width=32, context=64), torch.randint(16, (4, 64))
    schedule = build("zb_h1", 2, 2)
    expected = run_pipeline(module, schedule, batch, 2)
    found = run_pipeline(
        module, offloaded(schedule, ways), batch, 2, memory=memory_of_all, recompute=recompute
    )
    assert_bit_equal(found, expected)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.2), nn.Linear(4, 4))

    def forward(self, x):
        return x + checkpoint(self.layers, x, use_reentrant=False)


@pytest.mark.parametrize("ways", first(1, WAYS))
def test_checkpointed_blocks(ways):
    module = Regression([Checkpointed() for _ in range(4)]).double()
    batch = torch.randn(4, 4).double()
    assert_offload_changes_nothing(module, build("zb_h1", 2, 2), batch, ways, size=2)


def run_steps(plan, memory, steps=2):
    pipeline = InProcessPipeline(DemoGPT(width=16, context=6), plan, call_step, memory)
    for step in range(steps):
        pipeline.run(MODELS["gpt"].batch(plan.num_microbatches), 1, step)
    return pipeline


def measured_costs(pipeline, num_stages):
    stages = {i: s.memories[0] for rank in pipeline.ranks for i, s in rank.stages.items()}
    ordered = [stages[i] for i in range(num_stages)]
    return Costs(
        1.0,
        1.0,
        1.0,
        activation=[stage.activation_bytes for stage in ordered],
        weight_input=[stage.weight_input_bytes for stage in ordered],
        weight_residue=[stage.residue_bytes for stage in ordered],
    )


PLANNED = Costs(1.0, 1.0, 1.0, offload=0.2, reload=0.2)


@pytest.mark.parametrize(
    "plan",
    [
        offloaded(build("zb_h1", 2, 4), EVERYTHING),
        offloaded(build("1f1b", 2, 4), FOR_B),
        build("po_h", 2, 8, costs=PLANNED),
        offload_activations(build("gis_h", 2, 8), PLANNED, "half")[0],
    ],
    ids=lambda plan: plan.name,
)
def test_peaks_are_the_simulators(plan):
    pipeline = run_steps(plan, memory_of_all, steps=1)
    costs = measured_costs(pipeline, plan.num_stages)
    ledgers = [executor.memory.ledger for executor in pipeline.executors]
    on_device = tuple(ledger.peak_device_bytes for ledger in ledgers)
    on_host = tuple(ledger.peak_host_bytes for ledger in ledgers)
    assert min(on_device) > 0
    assert min(ledger.offloaded_bytes for ledger in ledgers) > 0
    assert (on_device, on_host) == (peak_memory(plan, costs), peak_host_memory(plan, costs))


def test_host_memory_is_filled_in_the_first_step():
    pipeline = run_steps(offloaded(build("zb_h1", 2, 4), FOR_B), memory_of_all, 1)
    hosts = [executor.memory.settings.host for executor in pipeline.executors]
    before = [host.num_allocations for host in hosts]
    for step in (1, 2):
        pipeline.run(MODELS["gpt"].batch(4), 1, step)
    assert [host.num_allocations for host in hosts] == before != [0, 0]


def test_after_an_error_memory_is_given_back_once_its_copies_are_waited_for():
    lanes = CopyLanes(LastMomentLane(), LastMomentLane())
    memory = memory_of_all(torch.device("cpu"), lanes=lanes)
    store, tensors = ActivationStore("", (), memory.settings), [torch.arange(8.0), torch.ones(8)]
    memory.start_step((), {0: SimpleNamespace(in_flight={0: SimpleNamespace(store=store)})})
    kept = [store.pack(tensors[0]), store.pack_weight_input(tensors[1])]
    store.start_offload()
    store.free()
    store.start_reload(MemoryPart.FOR_B)
    memory.abandon()
    assert (lanes.h2d.num_late, lanes.d2h.num_late) == (1, 2)
    num_allocations = memory.settings.host.num_allocations
    store = ActivationStore("", (), memory.settings)
    kept += [store.pack(torch.ones(8)), store.pack_weight_input(torch.ones(8))]
    store.start_offload()
    assert memory.settings.host.num_allocations == num_allocations


def test_host_memory_exhausted():
    plan = offloaded(build("1f1b", 2, 2), FOR_B)
    with pytest.raises(HostMemoryError, match="stage 0, microbatch 0: host memory .* exhausted"):
        run_steps(plan, functools.partial(memory_of_all, budget=HostBudget.configured(4096)))


@pytest.mark.parametrize("lane", ["d2h", "h2d"])
def test_a_copy_that_fails(lane):
    def memory(device):
        lanes = {"d2h": Lane(), "h2d": Lane(), lane: FailingLane(2)}
        return ActivationMemory(
            OffloadSettings(device, CopyLanes(**lanes), HostMemory(False), largest_to_stay=0)
        )

    plan = offloaded(build("1f1b", 2, 2), FOR_B)
    where = r"stage \d, microbatch \d: the copy of the tensor \(.*\) of float32 .* failed"
    with pytest.raises(CopyError, match=where):
        run_steps(plan, memory)


class SavesAnything(nn.Module):
    """Saves tensors of other shapes for each of its microbatches."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += type(x) is torch.Tensor  # not those of other stages
        wide = self.linear(x).repeat(1, 1 + self.num_calls)
        return torch.tanh(wide)[:, :4]


def test_saved_shapes_may_differ_between_microbatches():
    module = Regression([SavesAnything() for _ in range(4)]).double()
    batch = torch.randn(12, 4).double()
    assert_offload_changes_nothing(module, build("zb_h1", 2, 4), batch, EVERYTHING, size=3)


class WritesInPlace(nn.Module):
    """Writes to the output of exp, which its backward needs."""

    def forward(self, x):
        return x.exp().mul_(2)


def test_a_write_in_place_is_an_error():
    module = Regression([nn.Linear(4, 4), WritesInPlace(), nn.Linear(4, 4)])
    plan = offloaded(build("zb_h1", 2, 2), FOR_B)
    pipeline = InProcessPipeline(module, plan, call_step, memory_of_all)
    with pytest.raises(WrittenInPlaceError, match=r"stage \d, microbatch 0: the tensor \(1, 4\)"):
        pipeline.run(torch.randn(2, 4), 1)

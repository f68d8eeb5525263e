"""Steps whose activations go to the host and come back have the gradients of those that stay."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeoffload.runtime.activation_memory import ActivationMemory
from lightning_pipeoffload.runtime.activation_store import OffloadSettings
from lightning_pipeoffload.runtime.host_memory import HostMemory, HostMemoryError
from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.runtime.saved_tensor import WrittenInPlaceError
from lightning_pipeoffload.runtime.streams import CopyError, CopyLanes, InlineLane
from lightning_pipeoffload.schedule import SCHEDULES, Costs, build
from lightning_pipeoffload.schedule.memory import peak_memory
from lightning_pipeoffload.schedule.offload import offload_activations
from tests.runtime.models import MODELS, DemoGPT, Regression, call_step, run_pipeline
from tests.runtime.offloaded import (
    APART,
    EVERYTHING,
    FOR_B,
    QUEUE,
    FailingLane,
    memory_of_all,
    offloaded,
)

WAYS = {"for B": FOR_B, "apart": APART, "queue": QUEUE, "everything": EVERYTHING}


def assert_bit_equal(found, expected):
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=0)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=0, atol=0)


def assert_offload_changes_nothing(module, schedule, batch, ways, size=1, **memory):
    expected = run_pipeline(module, schedule, batch, size)
    plan = offloaded(schedule, ways)
    kept = functools.partial(memory_of_all, **memory)
    assert_bit_equal(run_pipeline(module, plan, batch, size, memory=kept), expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule(name):
    module, batch = DemoGPT(dropout=0.3, tie_weights=True), MODELS["gpt"].batch(8)
    assert_offload_changes_nothing(module, build(name, 2, 8), batch, EVERYTHING)


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_every_model(name, ways):
    module, batch = MODELS[name].make().double(), MODELS[name].batch(4)
    assert_offload_changes_nothing(module, build("zb_h1", 2, 2), batch, ways, size=2)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_late_copies_are_waited_for(ways, lanes):
    module, batch = MODELS["mlp"].make().double(), MODELS["mlp"].batch(2)
    schedule = build("zb_h1", 2, 2)
    assert_offload_changes_nothing(module, schedule, batch, ways, late=1e-3, lanes=lanes)


@pytest.mark.parametrize("recompute", ["cheap", "full"])
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_together_with_recompute(ways, recompute):
    module, batch = DemoGPT(dropout=0.3, width=32, context=64), torch.randint(16, (4, 64))
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


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_checkpointed_blocks(ways):
    module = Regression([Checkpointed() for _ in range(4)]).double()
    batch = torch.randn(4, 4).double()
    assert_offload_changes_nothing(module, build("zb_h1", 2, 2), batch, ways, size=2)


def small_gpt():
    return DemoGPT(width=16, context=6)


def run_steps(plan, memory, steps=2):
    pipeline = InProcessPipeline(small_gpt(), plan, call_step, memory)
    for step in range(steps):
        pipeline.run(MODELS["gpt"].batch(plan.num_microbatches), 1, step)
    return pipeline


def measured_costs(pipeline, num_stages):
    stages = {i: s.memory for rank in pipeline.ranks for i, s in rank.stages.items()}
    ordered = [stages[i] for i in range(num_stages)]
    return Costs(
        1.0,
        1.0,
        1.0,
        activation=[stage.activation_bytes for stage in ordered],
        weight_input=[stage.weight_input_bytes for stage in ordered],
        weight_residue=[stage.residue_bytes for stage in ordered],
    )


def assert_peak_is_the_simulators(pipeline, plan):
    costs = measured_costs(pipeline, plan.num_stages)
    peaks = tuple(e.memory.ledger.peak_device_bytes for e in pipeline.executors)
    assert min(peaks) > 0
    assert peaks == peak_memory(plan, costs)


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", ["zb_h1", "gis_h", "uniform"])
def test_peak_is_the_simulators(name, ways):
    plan = offloaded(build(name, 2, 8), ways)
    assert_peak_is_the_simulators(run_steps(plan, memory_of_all), plan)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "share"), [("uniform", "half"), ("uniform", "full"), ("gis_h", "half")]
)
def test_peak_of_a_planned_offload_is_the_simulators(name, share, num_ranks):
    schedule = build(name, num_ranks, 4 * num_ranks)
    costs = Costs(1.0, 1.0, 1.0, offload=0.2, reload=0.2)
    plan, report = offload_activations(schedule, costs, share)
    pipeline = run_steps(plan, memory_of_all, steps=1)
    assert sum(report.offloaded) > 0
    assert_peak_is_the_simulators(pipeline, plan)
    for executor in pipeline.executors:
        assert executor.memory.ledger.offloaded_bytes > 0


def test_host_memory_is_filled_in_the_first_step():
    plan = offloaded(build("zb_h1", 2, 4), FOR_B)
    allocations = [
        [
            e.memory.settings.host.num_allocations
            for e in run_steps(plan, memory_of_all, n).executors
        ]
        for n in (1, 3)
    ]
    assert allocations[0] == allocations[1] != [0, 0]


def test_a_plan_without_offload_installs_no_hooks(monkeypatch):
    opened = []
    original = ActivationMemory.open

    def count(self, action, microbatch):
        opened.append(original(self, action, microbatch))
        return opened[-1]

    monkeypatch.setattr(ActivationMemory, "open", count)
    run_steps(build("zb_h1", 2, 4), memory_of_all)
    assert sum(store is not None for store in opened) == 2  # each stage is measured once


def test_host_memory_exhausted():
    plan = offloaded(build("1f1b", 2, 2), FOR_B)
    with pytest.raises(HostMemoryError, match="stage 0, microbatch 0: host memory .* exhausted"):
        run_steps(plan, functools.partial(memory_of_all, budget=4096))


@pytest.mark.parametrize("lane", ["d2h", "h2d"])
def test_a_copy_that_fails(lane):
    def memory(device):
        lanes = {"d2h": InlineLane(), "h2d": InlineLane(), lane: FailingLane(2)}
        return ActivationMemory(OffloadSettings(CopyLanes(**lanes), HostMemory(False), smallest=1))

    plan = offloaded(build("1f1b", 2, 2), FOR_B)
    where = r"stage \d, microbatch \d: the copy of the tensor \(.*\) of float32 .* failed"
    with pytest.raises(CopyError, match=where):
        run_steps(plan, memory)


def test_microbatches_of_different_shapes():
    module, batch = MODELS["gpt"].make().double(), MODELS["gpt"].batch(5)
    assert_offload_changes_nothing(module, build("zb_h1", 2, 3), batch, EVERYTHING, size=2)


class WritesInPlace(nn.Module):
    """Writes to the output of exp, which its backward needs."""

    def forward(self, x):
        return x.exp().mul_(2)


@pytest.mark.parametrize("ways", [FOR_B, QUEUE], ids=["for B", "queue"])
def test_a_write_in_place_is_an_error(ways):
    module = Regression([nn.Linear(4, 4), WritesInPlace(), nn.Linear(4, 4)])
    plan = offloaded(build("zb_h1", 2, 2), ways)
    pipeline = InProcessPipeline(module, plan, call_step, memory_of_all)
    with pytest.raises(WrittenInPlaceError, match=r"stage \d, microbatch 0: the tensor \(1, 4\)"):
        pipeline.run(torch.randn(2, 4), 1)

"""Exactness on an accelerator, with ranks in one process; skipped where there is none."""

import pytest
import torch

from lightning_pipeoffload.metrics import PendingNumbers
from lightning_pipeoffload.runtime.memory import recompute
from lightning_pipeoffload.runtime.weight_grad import (
    add_product_in_float32,
    supports_float32_accumulation,
)
from lightning_pipeoffload.schedule import build
from tests.support.in_process import InProcessPipeline
from tests.support.offloaded import APART, EVERYTHING, FOR_B, QUEUE, memory_of_all, offloaded
from tests.support.small_modules import (
    MODELS,
    SCHEDULES,
    assert_same,
    call_step,
    run_pipeline,
    run_plain,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def on_device(tree):
    device = torch.accelerator.current_accelerator()
    if isinstance(tree, dict):
        return {name: tensor.to(device) for name, tensor in tree.items()}
    return tree.to(device)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_plain_modules(name, schedule, num_ranks):
    module, batch = on_device(MODELS[name].make().double()), on_device(MODELS[name].batch(8))
    found = run_pipeline(module, build(schedule, num_ranks, 4), batch, size=2)
    assert_same(found, run_plain(module, batch, size=2))


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_module_on_the_host_comes_over_stage_by_stage(name, schedule):
    module, batch = MODELS[name].make().double(), on_device(MODELS[name].batch(8))
    device = on_device(torch.empty(0)).device
    found = run_pipeline(module, build(schedule, 2, 4), batch, size=2, device=device)
    assert_same(found, run_plain(on_device(module), batch, size=2))


def with_dropout(name):
    module = MODELS[name].make()
    for layer in module.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.3
    return on_device(module), on_device(MODELS[name].batch(8))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_dropout_does_not_depend_on_ranks(num_ranks):
    module, batch = with_dropout("gpt")
    module = module.double()
    reference = run_pipeline(module, build("gpipe", 1, 4), batch, size=2)
    assert_same(run_pipeline(module, build("zb_h1", num_ranks, 4), batch, size=2), reference)


@pytest.mark.parametrize("how", ["cheap", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved_1f1b", "zb_v"])
@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2"])
def test_recomputed_values_are_the_forwards(name, schedule, how, monkeypatch):
    monkeypatch.setattr(recompute, "SMALLEST_NUMEL", 1)
    (module, batch), plan = with_dropout(name), build(schedule, 2, 4)
    plain = run_pipeline(module, plan, batch, size=2)
    assert_same(run_pipeline(module, plan, batch, size=2, recompute=how), plain, tolerance=0)


def test_weight_gradients_wait_for_w():
    module, batch = on_device(MODELS["gpt"].make()), on_device(MODELS["gpt"].batch(2))
    pipeline = InProcessPipeline(module, build("zb_h1", 2, 2), call_step)
    pipeline.run(batch, 1)
    stages = [stage for rank in pipeline.ranks for stage in rank.stages.values()]
    deferred = sum(stage.memories[0].deferred_flops for stage in stages)
    assert deferred == sum(rank.weight_flops for rank in pipeline.ranks)


def test_numbers_of_the_device_and_of_the_host_are_published_together():
    numbers = {"loss": on_device(torch.tensor(1.5)), "rate": 0.5, "count": torch.tensor(3)}
    fetch = PendingNumbers({"log": numbers, "pbar": {}})
    assert fetch() == {"log": {"loss": 1.5, "rate": 0.5, "count": 3.0}, "pbar": {}}


def test_action_times_are_read_off_the_device():
    module, batch = on_device(MODELS["gpt"].make()), on_device(MODELS["gpt"].batch(2))
    pipeline = InProcessPipeline(module, build("1f1b", 2, 2), call_step)
    pipeline.run(batch, 1)
    times = [executor.timer.action_seconds() for executor in pipeline.executors]
    assert all(seconds > 0 for rank in times for seconds in rank.values())


@pytest.mark.parametrize("ways", [FOR_B, APART, QUEUE, EVERYTHING])
@pytest.mark.parametrize("name", MODELS)
def test_offload_changes_no_gradient(name, ways):
    module, batch = on_device(MODELS[name].make().double()), on_device(MODELS[name].batch(4))
    plan = offloaded(build("zb_h1", 2, 2), ways)
    found = run_pipeline(module, plan, batch, size=2, memory=memory_of_all)
    assert_same(found, run_plain(module, batch, size=2))


def test_nothing_is_allocated_after_the_first_step():
    module, batch = on_device(MODELS["gpt"].make()), on_device(MODELS["gpt"].batch(4))
    plan = offloaded(build("zb_h1", 2, 4), EVERYTHING)
    pipeline = InProcessPipeline(module, plan, call_step, memory_of_all)
    counted = []
    for step in range(3):
        pipeline.run(batch, 1, step)
        hosts = [executor.memory.settings.host for executor in pipeline.executors]
        by_the_driver = torch.accelerator.memory_stats()["num_device_alloc"]
        counted.append((by_the_driver, *(host.num_allocations for host in hosts)))
    assert counted[0] == counted[1] == counted[2]


def test_products_are_added_to_float32_in_one_pass():
    weight = on_device(torch.zeros(64, 32)).requires_grad_()
    factors = on_device(torch.randn(3, 2, 64, 64)).bfloat16()
    assert supports_float32_accumulation(weight.device)
    for left, right in factors:
        add_product_in_float32(weight.bfloat16(), left, right[:, :32])
    exact = sum(left.double() @ right[:, :32].double() for left, right in factors)
    torch.testing.assert_close(weight.grad.double(), exact, rtol=1e-4, atol=1e-4)

"""``pipeoffload-plan tensor_parallel_size=...`` plans stages whose layers ranks share."""

import json

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lightning_pipeoffload.cli import model_probe
from lightning_pipeoffload.cli.model_planner import ModelPlanner
from lightning_pipeoffload.plan import plan
from lightning_pipeoffload.runtime.cut import classify_blocks, find_alike_blocks
from lightning_pipeoffload.runtime.measure import shape_memory
from lightning_pipeoffload.runtime.tensor_parallel import fake_process_group, sent_bytes
from lightning_pipeoffload.schedule import (
    COMPUTE_TIMES,
    RECOMPUTATIONS,
    Kind,
    PlanOption,
    ScheduleError,
    build,
    lower,
)
from tests import test_tensor_parallel as fits
from tests.support.composed import composed
from tests.support.pairs import slow
from tests.test_tensor_parallel import LONG, Run, fit, loader


class Data(LightningDataModule):
    def train_dataloader(self):
        return loader(**LONG)


def words(kind="Net", *overrides, size=2):
    return (
        *(f"+model._target_=tests.test_tensor_parallel.{kind}", "schedule=zb_h1", *overrides),
        *(f"data._target_={__name__}.Data", "num_ranks=2", "num_microbatches=4", "format=json"),
        f"tensor_parallel_size={size}",
    )


def planned(capsys, *overrides, **sizes):
    plan(composed("plan", *words(*overrides, **sizes)))
    assert not dist.is_initialized()
    return json.loads(capsys.readouterr().out)


CASES = {
    "tensor": ("Net", {}),
    "sequence": ("Net", {"plan": "sequence"}),
    "llama": ("Llama", {}),
    "torchtitan": ("LossOfShards", {"plan": "torchtitan"}),
}


def memory_of_a_run(folder):
    found = {}
    for case, (kind, module) in CASES.items():
        run = Run()
        options = {"kind": getattr(fits, kind), "module": module, "pipeline": {"offload": "none"}}
        fit((2, 2), folder, callbacks=[run], **options, **LONG)
        found[case] = run.strategy.report()["memory"]
    return found


def test_blocks_with_alike_shared_layers_are_of_one_class(monkeypatch):
    seen = []

    def find(chain, record, stages):
        seen.append(classify_blocks(chain, record))
        return find_alike_blocks(chain, record, stages)

    monkeypatch.setattr(shape_memory, "find_alike_blocks", find)
    config = composed("plan", *words("Net"))
    with fake_process_group(2):
        planner = ModelPlanner(config)
        planner.needs_of(PlanOption("zb_h1", 1, 4), 2)
    assert seen
    # The last has the loss as well.
    assert all(len(classes) == 4 and classes[1] == classes[2] for classes in seen)


class Deep(LightningModule):
    """Eight blocks; those in ``whole`` are not shared, and the step may count to eight."""

    def __init__(self, whole=(), counts=False):
        super().__init__()
        self.whole, self.counts = whole, counts

    def configure_model(self):
        if hasattr(self, "blocks"):
            return
        self.embed = nn.Embedding(fits.WORDS, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(8)
        )
        self.head = nn.Linear(8, fits.WORDS)
        for index, block in enumerate(self.blocks if self.device_mesh is not None else ()):
            if index not in self.whole:
                shared = {"0": ColwiseParallel(), "2": RowwiseParallel()}
                parallelize_module(block, self.device_mesh["tensor_parallel"], shared)

    def training_step(self, batch, batch_idx):
        hidden = self.embed(batch[0])
        for index in range(8 if self.counts else len(self.blocks)):
            hidden = self.blocks[index](hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize(
    ("more", "num_traced"),
    [((), 4), slow((("+model.whole=[3]",), 7)), slow((("+model.counts=true",), 4))],
)
def test_a_few_of_alike_blocks_are_traced_for_more_tensor_ranks(more, num_traced, monkeypatch):
    seen, leaving_out_blocks = [], model_probe.leaving_out_blocks

    def some(container, places):
        seen.append(max(places) + 1)
        return leaving_out_blocks(container, places)

    monkeypatch.setattr(model_probe, "leaving_out_blocks", some)

    def planner_of(size, like=None):
        of = f"+model._target_={__name__}.Deep", *words()[1:-1], f"tensor_parallel_size={size}"
        planner = ModelPlanner(composed("plan", *of, *more), like=like)
        planner.probe.recomputes = RECOMPUTATIONS
        planner.needs_of(PlanOption("zb_h1", 1, 4), 2)
        return planner

    def needs(planner):
        for recompute in RECOMPUTATIONS:
            found = planner.needs_of(PlanOption("zb_v", 2, 4, recompute), 2)
            yield [sorted(sizes.values()) for sizes in found.owned], found.sent, found.collectives
            yield found.needs_by_rank(lower(build("zb_v", 2, 4)))
            columns = (found.costs.per_stage(name, 4) for name in COMPUTE_TIMES)
            yield [[round(found.flops_of_one * work) for work in column] for column in columns]
        yield planner.probe.batch_flops

    with fake_process_group(2):
        one, alone = planner_of(1), planner_of(2)
        few = planner_of(2, one)
        assert seen == [num_traced]
        assert [*needs(few)] == [*needs(alone)]


@pytest.mark.slow
def test_memory_is_that_of_a_run(ranks, capsys, tmp_path):
    measured = ranks(4).run(memory_of_a_run, tmp_path)[0]
    for case, (kind, module) in CASES.items():
        arguments = [f"+model.{name}={value}" for name, value in module.items()]
        memory = planned(capsys, kind, *arguments)["memory"]
        assert {name: memory[name] for name in measured[case]} == measured[case], case


def test_the_devices_of_a_plan_are_counted_over_machines(capsys):
    of_device = "device=h100", "network=1MB", "devices_per_machine="
    near, far = (
        planned(capsys, "Net", *of_device[:2], f"{of_device[2]}{number}") for number in (4, 2)
    )
    assert far["period"] > near["period"] + 2 * near["memory"]["messages"][0] / 4 / 1e6
    plan(composed("plan", *words("Net", *of_device[:1]), "format=text"))
    assert "4 devices: 2 share the layers of each rank" in capsys.readouterr().out


def test_collectives_in_f_and_b_take_the_time_of_their_bytes():
    """Per block one all-reduce in F, and two in B, for the inputs of up and gate."""
    words_of_device = words("Net", "device=h100", "link=1GB", "efficiency=1")
    with fake_process_group(2):
        planner, option = (
            ModelPlanner(composed("plan", *words_of_device)),
            PlanOption("zb_h1", 1, 4),
        )
        needs = planner.needs_of(option, 2)
        costs = planner.costs_of(option, 2).seconds_by_kind(2)
    message = 2 * 192 * fits.WIDTH * 8  # an all-reduce of two ranks sends half of it twice
    assert [sum(needs.collectives[kind]) for kind in (Kind.F, Kind.B)] == [4 * message, 8 * message]
    assert sum(map(sum, costs.values())) == pytest.approx(12 * message / 1e9, rel=0.01)
    by_operations = (
        needs.costs_with_collective_waits.seconds_by_kind(2),
        needs.costs.seconds_by_kind(2),
    )
    waiting, alone = (sum(map(sum, of.values())) for of in by_operations)
    assert waiting - alone == pytest.approx(12 * message * 2000 / needs.flops_of_one)


@pytest.mark.parametrize(
    ("asked", "size", "message"),
    [
        ((), "auto", r"size \(auto\) is searched for a number of devices: add devices=8, or write"),
        ((), 0, r"tensor_parallel_size \(0\) must be a whole number from 1 on"),
        ((), 3, "cannot be shared in equal parts by tensor_parallel_size=3 along"),
        (("Net", "+strategy.tensor_parallel_size=2"), 1, "here; set tensor_parallel_size, without"),
        (
            ("Net", "num_sequence_slices=2"),
            2,
            "num_sequence_slices=2 is not supported with .*2: blocks of shards do not run on",
        ),
        (("Llama",), 4, r"size=4 does not divide the 2 heads of config\.num_key_value_heads"),
    ],
)
def test_sizes_that_cannot_be_are_refused(capsys, asked, size, message):
    with pytest.raises(ValueError, match=message) as refused:
        planned(capsys, *asked, size=size)
    assert "\n" not in str(refused.value)
    assert not dist.is_initialized()


def test_without_a_model_no_layers_are_shared():
    with pytest.raises(ScheduleError, match=r"tensor_parallel_size \(2\) is for a model, whose"):
        plan(composed("plan", "tensor_parallel_size=2"))


def test_bytes_around_a_ring_are_those_of_each_collective():
    ops, whole = torch.ops._c10d_functional, torch.empty(8)  # 32 bytes
    calls = [
        (ops.all_reduce.default, (whole, "sum"), 2 * 3 / 4 * 32),
        (ops.all_reduce_coalesced.default, ([whole, whole], "sum"), 2 * 2 * 3 / 4 * 32),
        (ops.all_gather_into_tensor.default, (whole, 4), 3 * 32),
        (ops.reduce_scatter_tensor.default, (whole, "sum", 4), 3 / 4 * 32),
    ]
    with fake_process_group(4):
        name = dist.group.WORLD.group_name
        for func, arguments, expected in calls:
            assert sent_bytes(func, (*arguments, name)) == expected
    assert sent_bytes(ops.wait_tensor.default, (whole,)) == 0

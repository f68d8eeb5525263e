"""torch's own schedules and CSV reader agree with ours."""

import csv
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import PipelineStage

from lightning_pipeoffload.schedule import (
    COMPUTE,
    Schedule,
    add_final_actions,
    build,
    lower,
    validate,
)
from tests.support.plans import SHAPES

OUR_KINDS = {"F": "F", "I": "B", "W": "W", "B": "BW"}


def ours(actions):
    """Return torch's compute actions as ours print, those that overlap one after the other."""
    return [
        f"{a.stage_index}{OUR_KINDS[a.computation_type.value]}{a.microbatch_index}"
        for action in actions
        if action is not None and action.is_compute_op
        for a in action.sub_actions or (action,)
    ]


def printed(schedule):
    """Return the compute actions of each rank as they print: copies and REDUCE are not torch's."""
    return [[str(action) for action in rank if action.kind in COMPUTE] for rank in schedule]


@pytest.mark.parametrize(
    ("name", "torchs", "p", "m", "v"),
    [
        *(("gpipe", "GPipe", p, m, 1) for p, m in [(2, 4), (4, 8), (4, 2)]),
        *(
            ("interleaved_1f1b", "Interleaved1F1B", *sizes)
            for sizes in [(2, 4, 2), (4, 16, 3), (8, 32, 4)]
        ),
    ],
)
def test_an_order_is_torchs(name, torchs, p, m, v):
    theirs = get_schedule_ops(torchs, p, m, **({"num_stages_per_rank": v} if v > 1 else {}))
    assert printed(build(name, p, m, v)) == [ours(rank) for rank in theirs]


def torch_runtime(schedule):
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod = 0, schedule.num_ranks, None
    stage.num_stages = schedule.num_stages
    return _PipelineScheduleRuntime([stage] * schedule.num_chunks, schedule.num_microbatches)


@pytest.mark.parametrize("name", SHAPES)
def test_torch_reads_and_lowers_our_csv(name, tmp_path):
    schedule = add_final_actions(build(name, num_ranks=4, num_microbatches=8))
    schedule.to_csv(tmp_path / "schedule.csv")
    runtime = torch_runtime(schedule)
    runtime._load_csv(tmp_path / "schedule.csv")
    assert [ours(runtime.pipeline_order[r]) for r in range(4)] == printed(schedule)
    assert [ours(runtime.pipeline_order_with_comms[r]) for r in range(4)] == printed(schedule)


MULTI_STAGE = [
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "LoopedBFS",
    "ZBVZeroBubble",
    "DualPipeV",
]


@pytest.mark.parametrize("name", MULTI_STAGE)
def test_torchs_multi_stage_schedules_read_into_ours(name, tmp_path):
    theirs = get_schedule_ops(name, 4, 8, num_stages_per_rank=2)
    with open(tmp_path / "theirs.csv", "w", newline="") as file:
        csv.writer(file).writerows(theirs)
    schedule = Schedule.from_csv(tmp_path / "theirs.csv")
    validate(lower(schedule))
    assert printed(schedule) == [ours(rank) for rank in theirs]
    assert (schedule.num_chunks, schedule.num_microbatches) == (2, 8)


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def two_stages_of_one_rank():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.Linear(3, 3)]


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zb_v", "1f1b_v"])
@pytest.mark.usefixtures("one_rank")
def test_torch_runs_our_csv_to_the_plain_gradients(name, tmp_path):
    schedule = build(name, num_ranks=1, num_microbatches=4)
    schedule.to_csv(tmp_path / "schedule.csv")
    modules, plain = two_stages_of_one_rank(), nn.Sequential(*two_stages_of_one_rank())
    stages = [PipelineStage(m, s, 2, torch.device("cpu")) for s, m in enumerate(modules)]
    loss = nn.MSELoss()
    runtime = _PipelineScheduleRuntime(stages, 4, loss_fn=loss)
    runtime._load_csv(tmp_path / "schedule.csv")
    batch, target = torch.randn(8, 3), torch.randn(8, 3)
    runtime.step(batch, target=target)
    loss(plain(batch), target).backward()
    for mine, theirs in zip(nn.ModuleList(modules).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)

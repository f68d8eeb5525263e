"""torch's own schedules and CSV reader agree with ours."""

from unittest import mock

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.distributed.pipelining.stage import PipelineStage

from lightning_pipeoffload.schedule import SCHEDULES, build

OUR_KINDS = {"F": "F", "I": "B", "W": "W", "B": "BW"}


def ours(actions):
    """Return torch's compute actions as ours print."""
    return [
        f"{a.stage_index}{OUR_KINDS[a.computation_type.value]}{a.microbatch_index}"
        for a in actions
        if a is not None and a.is_compute_op
    ]


def printed(schedule):
    return [[str(action) for action in rank] for rank in schedule]


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 16, 3), (8, 32, 4)])
def test_interleaved_1f1b_is_torchs(p, m, v):
    theirs = get_schedule_ops("Interleaved1F1B", p, m, num_stages_per_rank=v)
    assert printed(build("interleaved_1f1b", p, m, v)) == [ours(rank) for rank in theirs]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 2)])
def test_gpipe_is_torchs(p, m):
    assert printed(build("gpipe", p, m)) == [ours(rank) for rank in get_schedule_ops("GPipe", p, m)]


def torch_runtime(schedule):
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.submod = 0, schedule.num_ranks, None
    stage.num_stages = schedule.num_stages
    return _PipelineScheduleRuntime([stage] * schedule.num_chunks, schedule.num_microbatches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_and_lowers_our_csv(name, tmp_path):
    schedule = build(name, num_ranks=4, num_microbatches=8)
    schedule.to_csv(tmp_path / "schedule.csv")
    runtime = torch_runtime(schedule)
    runtime._load_csv(tmp_path / "schedule.csv")
    assert [ours(runtime.pipeline_order[r]) for r in range(4)] == printed(schedule)
    assert [ours(runtime.pipeline_order_with_comms[r]) for r in range(4)] == printed(schedule)

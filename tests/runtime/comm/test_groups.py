"""The groups of a pipeline's processes over gloo; one pool of two for the whole file."""

import gc
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_pipeoffload.runtime.comm import PipelineGroup, ProcessGroups
from lightning_pipeoffload.schedule import build
from tests.support.rank_pool import RankPool


@pytest.fixture(scope="module")
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()


def connect(**options):
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    schedule = build("1f1b", 2 // options.get("num_replicas", 1), 2)
    return PipelineGroup(schedule, dist.get_rank(), torch.device("cpu"), **options)


def count_meetings():
    """Return how many device groups are made, and how many of them have met."""
    met, made = [], []
    all_reduce, new_group = dist.all_reduce, dist.new_group

    def note_meeting(tensor, *args, group, **options):
        met.append(group)
        return all_reduce(tensor, *args, group=group, **options)

    def note_making(ranks, backend=None, **options):
        group = new_group(ranks, backend=backend, **options)
        if backend is None and dist.get_rank() in ranks:
            made.append(group)
        return group

    dist.all_reduce, dist.new_group = note_meeting, note_making
    try:
        connect(num_replicas=2)
        connect().make_device_group([0, 1])
        connect().make_device_group([0, 1])
        return len(made), made == met
    finally:
        dist.all_reduce, dist.new_group = all_reduce, new_group


def test_groups_on_the_device_meet_once_where_they_are_made(pool):
    # Of a pipeline and of three uses of replicas; of another pipeline, whose ranks are asked twice.
    assert pool.run(count_meetings) == [(5, True)] * 2


def break_off_and_renew():
    """Rank 0 begins what rank 1 never joins; then both connect anew."""
    group = connect()
    work = None
    if group.global_rank == 0:
        work = dist.all_reduce(torch.ones(1), group=group.make_device_group(), async_op=True)
    dist.barrier()
    ProcessGroups.retire_current(has_failed=True)
    assert not group.is_connected
    group.reconnect()
    failed = False
    if work is not None:
        try:
            work.wait()
        except RuntimeError:
            failed = True
    largest = torch.tensor(float(group.global_rank))
    group.all_reduce_over_ranks(largest, dist.ReduceOp.MAX, over_replicas=False)
    return failed, float(largest)


def test_what_was_broken_off_ends_before_groups_are_made_anew(pool):
    assert pool.run(break_off_and_renew) == [(True, 1.0), (False, 1.0)]


def count_groups_of_runs():
    """Return groups and threads of this process in each of six runs, which nobody collects."""
    counts = []
    gc.disable()
    for size in (1, 1, 1, 2, 2, 2):
        group = connect(num_replicas=size)
        group.me = group  # as a trainer and its module have each other
        threads = len(os.listdir("/proc/self/task"))
        counts.append((len(distributed_c10d._world.pg_map), threads))
    gc.enable()
    return counts


def test_runs_share_groups_and_leave_those_of_one_layout(pool):
    for counts in pool.run(count_groups_of_runs):
        assert counts[0] == counts[1] == counts[2]
        assert counts[3] == counts[4] == counts[5]
        assert counts[3][0] <= counts[0][0] + 6  # more uses; those of before have ended


def count_threads_of_runs():
    """Return the threads of this process with the groups of one run, and of two after another."""
    counts = []
    for size in (1, 2, 1):
        world = connect(num_replicas=size).world
        counts.append(len(os.listdir("/proc/self/task")))
        if dist.get_rank() == 0:
            world.start_number_broadcast(1, 1)  # rank 1 never sends it: who waited would time out
        del world
        gc.collect()
    return counts


def test_groups_of_a_run_that_has_ended_go_with_the_next_one_of_another_layout(pool):
    for first, _, third in pool.run(count_threads_of_runs):
        assert first >= third  # the first has those of other tests, too

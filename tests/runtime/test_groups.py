"""The groups of a pipeline's processes over gloo; one pool of two for the whole file."""

import gc
import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_pipeoffload.runtime.groups import PipelineGroup
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
    """Return how many groups had met when they were made, and how many are made in the end."""
    met, all_reduce = [], dist.all_reduce

    def note(tensor, *args, group, **options):
        met.append(group)
        return all_reduce(tensor, *args, group=group, **options)

    dist.all_reduce = note
    try:
        group = connect(num_replicas=2)
        alone = connect()
        alone.device_group([0, 1])
        made = [*group._device_groups.values(), *alone._device_groups.values()]
        return len(met), len(made), all(each in met for each in made)
    finally:
        dist.all_reduce = all_reduce


def test_groups_on_the_device_meet_once_where_they_are_made(pool):
    # Of a pipeline and of three uses of replicas; of another pipeline, whose ranks are asked twice.
    assert pool.run(count_meetings) == [(5, 5, True)] * 2


def break_off_and_renew():
    """Rank 0 begins what rank 1 never joins; then both connect anew."""
    group = connect()
    work = None
    if group.global_rank == 0:
        work = dist.all_reduce(torch.ones(1), group=group.device_group(), async_op=True)
    dist.barrier()
    group.renew()
    failed = False
    if work is not None:
        try:
            work.wait()
        except RuntimeError:
            failed = True
    total = float(group.largest(torch.tensor(float(group.global_rank))))
    return failed, total


def test_what_was_broken_off_ends_before_groups_are_made_anew(pool):
    assert pool.run(break_off_and_renew) == [(True, 1.0), (False, 1.0)]


def count_threads_of_runs():
    """Return the threads of this process with the groups of one run, and of two after another."""
    counts = []
    for _ in range(3):
        world = connect().world
        counts.append(len(os.listdir("/proc/self/task")))
        if dist.get_rank() == 0:
            world.start_sharing(1, 1)  # rank 1 never sends it: who waited would time out
        del world
        gc.collect()
    return counts


def count_device_groups_of_runs():
    """Return the groups of a device that there are as each of four runs makes its first one."""
    counts, new_group = [], dist.new_group

    def make(ranks, backend=None, **options):
        if backend is None:
            counts.append(
                sum(name == "stand_in" for name, _ in distributed_c10d._world.pg_map.values())
            )
        return new_group(ranks, backend=backend or "stand_in", **options)

    dist.Backend.register_backend("stand_in", dist.ProcessGroupGloo, devices=["cpu"])
    dist.new_group = make
    try:
        for _ in range(4):
            connect()
            gc.collect()
    finally:
        dist.new_group = new_group
    return counts


def test_groups_of_a_run_that_has_ended_go_with_the_next_one(pool):
    assert pool.run(count_device_groups_of_runs) == [[0, 0, 0, 0]] * 2
    for first, second, third in pool.run(count_threads_of_runs):
        assert first >= second == third  # the first has those of other tests, too

"""What a minibatch costs: waits between ranks, and memory; a rank that fails ends all."""

from collections import Counter
from contextlib import contextmanager
from functools import partial
from threading import Event

import pytest
import torch
from torch.profiler import profile, record_function

from lightning_pipeoffload.odc import OnDemandRun, transport
from lightning_pipeoffload.odc.fsdp_hooks import _Push
from lightning_pipeoffload.odc.minibatch_training import MinibatchTraining
from lightning_pipeoffload.runtime.comm import shared_bytes
from lightning_pipeoffload.runtime.memory import MachineMemory
from tests.support import failing_on_demand
from tests.support.forked_runs import run_forked
from tests.support.on_demand_fits import Texts, fit_rank, made
from tests.support.pairs import some


def counted():
    """Fit, and count the collectives of each minibatch, and those between its two waits."""
    train, opened, closed = MinibatchTraining.train, OnDemandRun.open, OnDemandRun.close
    inside, around = [], []
    between = record_function("between the waits")

    def counting_train(self, *args, **kwargs):
        with profile() as trace:
            output = train(self, *args, **kwargs)
        events = trace.events()
        (span,) = [event.time_range for event in events if event.name == between.name]
        calls = [event for event in events if event.name.startswith("c10d::")]
        around.append(Counter(call.name for call in calls))
        inside.append([c.name for c in calls if span.start <= c.time_range.start <= span.end])
        return output

    def counting_open(self, *args):
        opened(self, *args)
        between.__enter__()

    def counting_close(self, *args):
        between.__exit__(None, None, None)
        return closed(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OnDemandRun, "open", counting_open)
        patch.setattr(OnDemandRun, "close", counting_close)
        patch.setattr(MinibatchTraining, "train", counting_train)
        fit_rank((3, 1))
    return inside, around


def test_ranks_meet_before_and_after_a_minibatch_and_not_in_it(ranks):
    for inside, around in ranks(2).run(counted):
        assert inside == [[]] * 4
        # What is told at the end goes round twice: how long it is, and what it is.
        assert around == [{"c10d::barrier": 1, "c10d::allgather_": 2}] * 4


def shared_sizes():
    sizes, share = [], transport.allocate_shared_memory

    def noting(size, *args):
        sizes.append(size)
        return share(size, *args)

    transport.allocate_shared_memory = noting
    try:
        fit_rank((1, 1), make=partial(made, dtype=torch.float32))
    finally:
        transport.allocate_shared_memory = share
    return sum(sizes)


def test_a_rank_shares_its_shard_and_its_sum(ranks):
    shard = sum(-(-p.shape[0] // 2) * p[0].numel() * 4 for p in Texts(tie=True).parameters())
    groups = 4
    for size in ranks(2).run(shared_sizes):
        assert 2 * shard <= size <= 2 * (shard + 64 * groups)


def test_too_little_shared_memory_is_refused(ranks):
    for told in ranks(2).run(fit_without_memory):
        assert "rank 0 of this machine has no shared memory: " in told
        assert "MiB are needed, and 0 MiB are free" in told


def fit_without_memory():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_bytes, "machine_memory", lambda: MachineMemory(1 << 30, 1))
        with pytest.raises(RuntimeError) as refusal:
            fit_rank((1, 1))
    return str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "most"), [(2, 0.70), (4, 0.45)])
def test_uneven_ranks_take_less_time_than_with_collectives(ranks, num_ranks, most):
    from examples.benchmarks.on_demand import skewed

    found = ranks(num_ranks).run(skewed)
    assert max(rank["on demand"] / rank["collective"] for rank in found) <= most


def pushed_to_a_slow_owner():
    """Hold each addition back until two pushes have returned; return whether they have."""
    push, held = _Push.__call__, shared_bytes.OwnerLocks.hold_lock
    returned, went_on, are_two = [], [], Event()

    def counted(self, *args, **kwargs):
        push(self, *args, **kwargs)
        returned.append(self)
        if len(returned) == 2:
            are_two.set()

    @contextmanager
    def slow(self, *place):
        with held(self, *place):
            went_on.append(are_two.wait(1000))
            yield

    _Push.__call__, shared_bytes.OwnerLocks.hold_lock = counted, slow
    try:
        fit_rank((1, 1))
    finally:
        _Push.__call__, shared_bytes.OwnerLocks.hold_lock = push, held
    return all(went_on) and bool(went_on)


def test_a_backward_goes_on_while_an_owner_is_slow(ranks):
    assert ranks(2).run(pushed_to_a_slow_owner) == [True, True]


@pytest.mark.parametrize(("place", "rank"), some([("push", 1), ("gather", 1), ("barrier", 1)], 3))
def test_a_killed_rank_is_named(place, rank):
    run = run_forked(failing_on_demand.main, place, "kill", str(rank))
    assert run.status != 0
    because = f"global rank {rank}, which was killed by SIGKILL"
    assert run.lines == [f"[pipeoffload] global rank {1 - rank} stops because of {because}"]


def test_an_exception_in_a_push_names_the_place():
    run = run_forked(failing_on_demand.main, "push", "raise", "1")
    place = "the push of blocks.0 to rank 1"
    error = f"RuntimeError: on purpose (in {place})"
    assert run.lines == [
        f"[pipeoffload] global rank 1 failed in {place}",
        f"[pipeoffload] global rank 0 stops because of global rank 1: {error}",
    ]

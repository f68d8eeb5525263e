from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_pipeoffload.runtime.run import Executor
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.runtime.step import StageRunner
from lightning_pipeoffload.schedule import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    build,
    validate,
)
from tests.support.in_process import InProcessPipeline, InProcessTransport
from tests.support.offloaded import memory_of_all
from tests.support.small_modules import (
    DemoGPT,
    Regression,
    assert_same,
    call_step,
    linear_blocks,
    run_pipeline,
    run_plain,
    tokens,
)


def random_schedule(stage_ranks, num_microbatches, seed):
    """Put F, B and W of every stage and microbatch into any order that respects what waits."""
    draw = random.Random(seed)
    ranks = [[] for _ in range(max(stage_ranks) + 1)]
    ready = [Action(Kind.F, 0, microbatch) for microbatch in range(num_microbatches)]
    while ready:
        action = ready.pop(draw.randrange(len(ready)))
        ranks[stage_ranks[action.stage]].append(action)
        ready.extend(_released_by(action, len(stage_ranks) - 1))
    schedule = Schedule.of(ranks, f"random {seed}")
    validate(schedule)
    return schedule


def _released_by(action, last_stage):
    kind, stage, microbatch = action
    if kind is Kind.F and stage < last_stage:
        return [Action(Kind.F, stage + 1, microbatch)]
    if kind is Kind.F:
        return [Action(Kind.B, stage, microbatch)]
    if kind is Kind.B:
        upstream = [Action(Kind.B, stage - 1, microbatch)] if stage else []
        return [Action(Kind.W, stage, microbatch), *upstream]
    return []


PLACEMENTS = [(0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2)]  # a loop, a V, one each


def actions(text):
    return [Action.parse(word) for word in text.split()]


def test_any_valid_order_gives_the_plain_gradients():
    module, batch = DemoGPT(depth=4, tie_weights=True).double(), tokens(3)
    expected = run_plain(module, batch, size=1)
    for seed, placement in enumerate(2 * PLACEMENTS):
        found = run_pipeline(module, random_schedule(placement, 3, seed), batch, size=1)
        assert_same(found, expected)


class HeldBytes:
    """What autograd has saved of one tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


class Watched(nn.Module):
    """A block that remembers, weakly, what autograd saves in it, and what it computes."""

    __alive__: weakref.WeakSet  # the pipeline refuses what a backward writes, but for such names

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    @staticmethod
    def watch(tensor, found=None):
        if not isinstance(tensor, ShapeOnly):  # a trace's have no memory, and await the collector
            Watched.__alive__.add(tensor if found is None else found)
        return found

    def forward(self, x):
        with saved_tensors_hooks(lambda t: self.watch(t, HeldBytes(t)), lambda held: held.tensor):
            out = torch.nn.functional.gelu(self.linear(self.norm(x))).sin()
            self.watch(out)
            return x + out


@pytest.fixture
def without_gc():
    Watched.__alive__ = weakref.WeakSet()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_gc")
def test_after_backward_only_the_queue_is_alive(monkeypatch):
    found, execute = {}, Executor.execute

    def look(executor, action):
        found[str(action)] = len(Watched.__alive__)
        execute(executor, action)

    monkeypatch.setattr(Executor, "execute", look)
    plan = Schedule.of([actions("0F0 0B0 0W0")])
    module = Regression([Watched(), Watched()]).double()
    pipeline = InProcessPipeline(module, plan, call_step, memory_of_all)
    pipeline.run(torch.randn(3, 4).double(), 3)
    assert found["0B0"] > 10
    assert found["0W0"] == 0
    # inputs and output gradients of 4 linear layers, 3 rows of 4 doubles; the head's has 1 column,
    # and the first one's input is the batch, which is there anyway
    stage = pipeline.ranks[0].stages[0]
    assert not stage.in_flight
    assert stage.memories[0].residue_bytes == 8 * 3 * (3 * 4 + 3 * 4 + 1)


@pytest.mark.usefixtures("without_gc")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_after_a_step_nothing_is_alive(num_ranks):
    module = Regression([Watched() for _ in range(4)]).double()
    run_pipeline(module, build("zb_h1", num_ranks, 4), torch.randn(4, 4).double(), 1)
    assert not Watched.__alive__


@pytest.mark.usefixtures("without_gc")
def test_a_step_that_is_dropped_frees_what_its_forwards_saved(monkeypatch):
    def fail(*_, **options):
        raise OSError("lost")

    monkeypatch.setattr(StageRunner, "backward", fail)
    module = Regression([Watched() for _ in range(4)]).double()
    pipeline = InProcessPipeline(module, build("zb_h1", 2, 4), call_step)
    with pytest.raises(OSError, match="lost") as caught:
        pipeline.run(torch.randn(4, 4).double(), 1)
    del caught
    assert Watched.__alive__
    for executor in pipeline.executors:
        executor.abandon()
        assert not any(stage.in_flight for stage in executor.stages.values())
    assert not Watched.__alive__


def test_ranks_that_wait_for_each_other_are_an_error():
    pipeline = InProcessPipeline(Regression(linear_blocks(2)), build("1f1b", 2, 2), call_step)
    receive_first = actions("1RECV_F1 1RECV_F0 1F0 1F1")
    pipeline.plan = Schedule.of([actions("0F0 0SEND_F0"), receive_first])
    with pytest.raises(ScheduleError, match="rank 1 is at 1RECV_F1 and waits for 0SEND_F1"):
        pipeline.run(torch.randn(2, 4), 1)


def test_every_kind_of_action_has_a_method():
    pipeline = InProcessPipeline(Regression(linear_blocks(2)), build("1f1b", 2, 2), call_step)
    assert pipeline.executors[0]._handlers.keys() == {*Kind}


def test_nothing_is_posted_that_needs_what_is_still_to_be_sent(monkeypatch):
    done = []
    monkeypatch.setattr(InProcessTransport, "post", lambda self, receive, *_: done.append(receive))
    watched = InProcessTransport.send

    def send(self, action, *message):
        done.append(action)
        watched(self, action, *message)

    monkeypatch.setattr(InProcessTransport, "send", send)
    schedule = build("1f1b", 2, 4)
    run_pipeline(Regression(linear_blocks(4)), schedule, torch.randn(4, 4), 1)
    for microbatch in range(4):
        sent = done.index(Action(Kind.SEND_F, 0, microbatch))
        assert sent < done.index(Action(Kind.RECV_B, 0, microbatch))

"""Lists of a class or a Python module hold what one device would put there, and no placeholders."""

import pytest
import torch
from torch import nn

from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.schedule import build
from tests.support.small_modules import Regression, call_step, linear_blocks, users_step

LOG, COUNTS, NUM_CALLS = [], {"calls": 0, "seen": []}, 0
MEAN = torch.zeros(())


class Collecting(Regression):
    losses = []
    table = {"first": []}
    num_steps = 0

    def __init__(self):
        super().__init__(linear_blocks(4))

    def step(self, x):
        global NUM_CALLS
        NUM_CALLS += 1
        type(self).num_steps += 1
        COUNTS["calls"] += 1
        COUNTS["seen"].append(len(x))
        self.table["first"].append(float(x[0, 0]))
        MEAN.add_(x.mean().detach())
        x = x * (1 + NUM_CALLS) * (1 + COUNTS["calls"]) + len(self.table["first"]) + self.num_steps
        loss = super().step(x)
        self.losses.append(loss.detach())
        LOG.append({"loss": loss.detach()})
        return loss


def empty():
    global NUM_CALLS
    NUM_CALLS, Collecting.num_steps = 0, 0
    for container in (LOG, Collecting.losses, Collecting.table["first"], COUNTS["seen"]):
        container.clear()
    COUNTS["calls"] = 0
    MEAN.zero_()


def outcome(losses):
    return {
        "losses": torch.stack([*losses]),
        "kept": torch.stack(Collecting.losses),
        "log": torch.stack([entry["loss"] for entry in LOG]),
        "numbers": (NUM_CALLS, Collecting.num_steps, COUNTS["calls"], list(COUNTS["seen"])),
        "first": list(Collecting.table["first"]),
        "mean": MEAN.clone(),
    }


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_they_hold_what_one_device_puts_there(schedule):
    module, x = Collecting(), torch.randn(8, 4)
    empty()
    expected = outcome([call_step(module, p).detach() for _ in range(2) for p in x.split(2)])
    empty()
    pipeline = InProcessPipeline(module, build(schedule, 1, 4), call_step)
    losses = pipeline.run(x, 2) + pipeline.run(x, 2)
    torch.testing.assert_close(outcome(losses), expected)


def test_a_probe_leaves_nothing():
    empty()
    pipeline = InProcessPipeline(Collecting(), build("zb_h1", 2, 4), call_step)
    for rank in pipeline.ranks:
        rank.cut_batch(torch.randn(8, 4), 2, users_step(rank.module.step), "train", 0)
    assert (LOG, Collecting.losses, COUNTS, NUM_CALLS) == ([], [], {"calls": 0, "seen": []}, 0)


class Noting(nn.Linear):
    def forward(self, x):
        LOG.append({"in": "block"})  # <- in a block
        return super().forward(x)


class NotingTwice(Collecting):
    def __init__(self, blocks, behind):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.behind = behind

    def step(self, x):
        if not self.behind:
            LOG.append({"in": "step"})  # <- beside the blocks
        loss = Regression.step(self, x)
        if self.behind:
            LOG.append({"in": "step"})
        return loss


def noting_twice(schedule, num_ranks, *, behind):
    empty()
    module = NotingTwice([Noting(4, 4) for _ in range(4)], behind)
    InProcessPipeline(module, build(schedule, num_ranks, 4), call_step).run(torch.randn(8, 4), 2)
    found = [entry["in"] for entry in LOG]
    return found.count("block"), found.count("step")


def test_what_blocks_put_where_the_steps_beginning_does_too_is_refused_on_several_stages():
    with pytest.raises(ValueError, match=r"writes .*LOG in .*# <- beside.*# <- in a block"):
        noting_twice("zb_v", 1, behind=False)
    with pytest.raises(ValueError, match="a rank has several stages"):
        noting_twice("zb_v", 2, behind=False)


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_v"])
def test_what_blocks_put_where_the_steps_end_does_too_is_there(schedule):
    assert noting_twice(schedule, 1, behind=True) == (16, 4)

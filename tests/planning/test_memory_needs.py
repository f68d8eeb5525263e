"""What a rank needs: its own parameters once, gradients of what trains, states by parameter."""

import torch
from torch import nn

from lightning_pipeoffload.planning.measurements import read_step_times
from lightning_pipeoffload.planning.memory_needs import (
    MemoryNeeds,
    add_snapshot_bytes,
    describe_needs,
)
from lightning_pipeoffload.runtime.device import TimedStep
from lightning_pipeoffload.runtime.memory import HeldBytes
from lightning_pipeoffload.runtime.run import Ledger, split_into_microbatches
from lightning_pipeoffload.schedule import Action, Kind, build
from tests.support.in_process import InProcessPipeline


class Tied(nn.Module):
    """The head multiplies by the embedding; a block is frozen, another has a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.blocks[1].requires_grad_(False)
        self.blocks[3].register_buffer("mask", torch.ones(100))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return (x @ self.embed.weight.T).square().mean()


EMBEDDING, BLOCK, MASK = 4 * 32 * 16, 4 * (16 * 16 + 16), 400


def needs(schedule, states=None):
    plan = build(schedule, 2, 4)
    pipeline = InProcessPipeline(Tied(), plan, lambda model, x: model(x), split="even")
    rank = pipeline.ranks[0]
    batch = torch.randint(32, (256, 4))
    parts = split_into_microbatches(rank, batch, 64, lambda part, _: rank.module(part), "train", 0)
    known = {} if states is None else states(rank.module)
    return describe_needs(MemoryNeeds.of(rank, parts[0], known).needs_by_rank(pipeline.plan))


def test_each_rank_has_its_own_and_the_shared_once():
    found = needs("1f1b")
    assert found["parameters"] == [EMBEDDING + 2 * BLOCK, EMBEDDING + 2 * BLOCK + MASK]
    assert found["gradients"] == [EMBEDDING + BLOCK, EMBEDDING + 2 * BLOCK]


def test_two_stages_of_a_rank_share_a_tied_weight():
    found = needs("zb_v")
    assert found["parameters"] == [EMBEDDING + 2 * BLOCK + MASK, 2 * BLOCK]
    assert found["gradients"] == [2 * EMBEDDING + 2 * BLOCK, BLOCK]


def test_copies_of_a_step_are_on_the_device_where_it_has_room():
    memory = {"device": [40, 70], "host": [0, 5]}
    add_snapshot_bytes(memory, [(30, 0), (10, 3)], 75)
    assert memory["step_copies"] == [30, 13]
    assert (memory["device"], memory["host"]) == ([70, 70], [0, 18])


# One rank's step in times of its host

F0, F1 = (Action(Kind.F, 0, microbatch) for microbatch in range(2))
W0, W1 = (Action(Kind.W, 0, microbatch) for microbatch in range(2))


def test_actions_that_ran_as_one_have_an_even_part_each():
    together, ledger = [(4, 10)], Ledger(lambda action: HeldBytes())
    ledger.start_step()
    ledger.record(F0, HeldBytes(device=3))
    step = TimedStep(0, 10, [(F0, [(0, 1), (2, 3)], 1), (W0, together, 2), (W1, together, 2)])
    found = read_step_times(step, ledger, lambda moment: moment + 100.0)
    assert found.actions == [(F0, [(100, 101), (102, 103)]), (W0, [(104, 107)]), (W1, [(107, 110)])]
    assert found.held == [(F0, 3.0)]

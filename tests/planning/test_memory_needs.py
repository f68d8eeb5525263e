"""What a rank needs: its own parameters once, gradients of what trains, states by parameter."""

import torch
from torch import nn

from lightning_pipeoffload.planning.memory_needs import MemoryNeeds, add_step_copies, describe_needs
from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.schedule import build


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
    parts = rank.cut_batch(batch, 64, lambda part, _: rank.module(part), "train", 0)
    known = {} if states is None else states(rank.module)
    return describe_needs(MemoryNeeds.of(rank, parts[0], known).of_ranks(pipeline.plan))


def test_each_rank_has_its_own_and_the_shared_once():
    found = needs("1f1b")
    assert found["parameters"] == [EMBEDDING + 2 * BLOCK, EMBEDDING + 2 * BLOCK + MASK]
    assert found["gradients"] == [EMBEDDING + BLOCK, EMBEDDING + 2 * BLOCK]


def test_two_stages_of_a_rank_share_a_tied_weight():
    found = needs("zb_v")
    assert found["parameters"] == [EMBEDDING + 2 * BLOCK + MASK, 2 * BLOCK]
    assert found["gradients"] == [2 * EMBEDDING + 2 * BLOCK, BLOCK]


def test_states_are_those_of_the_ranks_parameters():
    found = needs("zb_v", lambda module: {id(module.embed.weight): 7, id(module.blocks[1].bias): 5})
    assert found["optimizer"] == [7, 5]


def test_messages_are_what_is_on_its_way():
    hidden = 4 * 64 * 4 * 16
    first, last = needs("1f1b")["messages"]
    assert first % hidden == last % hidden == 0
    assert hidden <= last <= 4 * hidden


def test_copies_of_a_step_are_on_the_device_where_it_has_room():
    memory = {"device": [40, 70], "host": [0, 5]}
    add_step_copies(memory, [(30, 0), (10, 3)], 75)
    assert memory["step_copies"] == [30, 13]
    assert (memory["device"], memory["host"]) == ([70, 70], [0, 18])

"""When offloading fails in a run of processes, all of them end, and one says where and why."""

import re
import sys

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.runtime.device import CopyLanes, Lane
from lightning_pipeoffload.runtime.run import rank_memory
from tests.support.fits import SILENT
from tests.support.forked_runs import run_forked
from tests.support.offloaded import FailingLane
from tests.support.pairs import first


class Shrinking(nn.Module):
    """Returns one row less in its third microbatch."""

    def __init__(self, shrinks):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.shrinks = shrinks
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += type(x) is torch.Tensor
        x = torch.tanh(self.linear(x))
        return x[1:] if self.shrinks and self.num_calls == 3 else x


class Net(L.LightningModule):
    def __init__(self, cause):
        super().__init__()
        self.blocks = nn.Sequential(*(Shrinking(cause == "shape" and i == 1) for i in range(4)))

    def training_step(self, batch, batch_idx):
        return self.blocks(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_failing_lanes(device, count=2):
    return CopyLanes(FailingLane(3), Lane())


def main():
    cause, rank = sys.argv[1], int(sys.argv[2])
    limit = "10KiB" if cause == "host" else None
    strategy = PipeOffloadStrategy(
        schedule="po_f", num_chunks=2, num_microbatches=4, host_memory_limit=limit
    )
    trainer = L.Trainer(
        **SILENT, devices=2, strategy=strategy, max_steps=2, enable_checkpointing=False
    )
    if cause == "copy" and trainer.global_rank == rank:
        rank_memory.make_lanes = make_failing_lanes
    torch.manual_seed(0)
    trainer.fit(Net(cause), DataLoader(TensorDataset(torch.randn(128, 64)), 128))


FAILURES = {
    "host": (
        "OFFLOAD of microbatch 0",
        r"stage \d, microbatch 0: host memory for offloading is exhausted: .* host_memory_limit is "
        r"10\.00 KiB; offload less",
    ),
    "shape": ("F of microbatch 2", r"blocks\.1 returned .*31, 64.* where .*32, 64.* was expected"),
    "copy": (
        r"OFFLOAD of microbatch \d",
        r"stage \d, microbatch \d: the copy of the tensor \(32, 64\) of float32 to the host failed",
    ),
}


@pytest.mark.parametrize("cause", first(1, [*FAILURES]))
def test_the_place_and_the_tensor_are_named(cause):
    place, message = FAILURES[cause]
    run = run_forked(main, cause, "0")
    assert run.status == 1
    assert re.search(rf"\[pipeoffload\] global rank \d failed in stage \d, {place}", run.errors)
    assert re.search(message, run.errors)

"""A run whose offload fails as its arguments say: the cause, and the global rank."""

from __future__ import annotations

import sys

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.runtime import rank_memory
from lightning_pipeoffload.runtime.memory.streams import CopyLanes, Lane
from tests.support.fits import SILENT
from tests.support.offloaded import FailingLane


class Shrinking(nn.Module):
    """Returns one row less in its third microbatch."""

    def __init__(self, shrinks: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.shrinks = shrinks
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += type(x) is torch.Tensor
        x = torch.tanh(self.linear(x))
        return x[1:] if self.shrinks and self.num_calls == 3 else x


class Net(L.LightningModule):
    def __init__(self, cause: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Shrinking(cause == "shape" and i == 1) for i in range(4)))

    def training_step(self, batch, batch_idx):
        return self.blocks(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_failing_lanes(device: torch.device, count: int = 2) -> CopyLanes:
    return CopyLanes(FailingLane(3), Lane())


def main() -> None:
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

"""Highest resident memory of each rank while a module is made, above that of the imports.

Run: python examples/benchmarks/build_memory.py [--ranks 4] [--width 2048] [--depth 32] [--small]

A float32 transformer of 1.5 GiB that makes its layers in ``configure_model``. A rank may take its
own share, one block and 200 MiB; its exit status is 1 where it takes more.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly

MIB = 1 << 20
SLACK = 200 * MIB


class Block(nn.Module):
    """Two matrices of ``width`` squared and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.drawn = nn.Parameter(torch.randn(width, width) / width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the input."""
        return x + self.down(torch.relu(self.up(self.norm(x)) @ self.drawn))


class Net(L.LightningModule):
    """Makes its layers where Lightning makes those of large models."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width, self.depth = width, depth

    def configure_model(self) -> None:
        """Make the layers."""
        self.blocks = nn.Sequential(*(Block(self.width) for _ in range(self.depth)))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def training_step(self, batch, batch_idx):
        """Return a loss."""
        return self.blocks(batch[0]).square().mean()

    def configure_optimizers(self):
        """Return an optimizer without a state."""
        return torch.optim.SGD(self.parameters(), lr=1e-5)


def highest() -> int:
    """Return the highest resident memory so far, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class Peak(L.Callback):
    """Notes the memory when the module has been made."""

    taken = 0

    def on_fit_start(self, trainer, module):
        """Note it, before the first batch."""
        self.taken = highest()
        real = [p for p in module.parameters() if not isinstance(p, ShapeOnly)]
        self.share = sum(p.nbytes for p in real)


def main() -> int:
    parser = argparse.ArgumentParser()
    for name, default in (("ranks", 4), ("width", 2048), ("depth", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--small", action="store_true", help="a few MiB, to see that it runs")
    options = parser.parse_args()
    if options.small:
        options.width, options.depth = 64, 8
    base = highest()
    peak = Peak()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy=PipeOffloadStrategy(num_microbatches=options.ranks),
        max_steps=1,
        callbacks=[peak],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.ones(options.ranks, options.width)), options.ranks)
    trainer.fit(Net(options.width, options.depth), data)
    block = 12 * options.width**2
    taken, allowed = peak.taken - base, peak.share + block + SLACK
    figures = {"taken": taken, "share": peak.share, "block": block, "allowed": allowed}
    found = {name: round(value / MIB, 1) for name, value in figures.items()}
    print(json.dumps({"rank": trainer.global_rank, **found}), flush=True)
    return int(taken > allowed)


if __name__ == "__main__":
    sys.exit(main())

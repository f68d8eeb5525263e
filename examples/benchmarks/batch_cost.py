"""What one batch costs beyond the arithmetic: a toy model's, under plain Lightning, ddp and this.

    python examples/benchmarks/batch_cost.py
    python examples/benchmarks/batch_cost.py --batches 1000 --logs

A net of four small layers, so nearly all that is measured is what Lightning, the strategy and the
messages take. Each run prints the median, and the quickest tenth, of the milliseconds from one
batch's start to the next, on global rank 0, and the median that its process computed of them: what
a busy machine changes least. The pipeline runs ``--microbatches`` of each batch;
"plain" runs it whole on one device, "accumulated" as that many batches of their own.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeoffload import PipeOffloadStrategy

_NUM_WARM = 20  # batches at the start, with probes and plans
_ROW = "{:<18}{:>10}{:>10}{:>10}"


class TinyNet(L.LightningModule):
    """Four layers of width 16."""

    def __init__(self, logs: bool) -> None:
        super().__init__()
        self.logs = logs
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return a loss."""
        (x,) = batch
        for layer in self.layers:
            x = torch.tanh(layer(x))
        loss = x.square().mean()
        if self.logs:
            self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class BatchTimes(L.Callback):
    """Notes when each batch starts; several that accumulate are one.

    Args:
        accumulated: how many do.
    """

    def __init__(self, accumulated: int) -> None:
        self._accumulated = accumulated
        self._starts: list[tuple[float, float]] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the time."""
        if batch_idx % self._accumulated == 0:
            self._starts.append((time.perf_counter(), time.process_time()))

    def between(self) -> tuple[list[float], list[float]]:
        """Return the milliseconds from each to the next, of a clock and of this process."""
        starts = self._starts[_NUM_WARM:]
        pairs = list(zip(starts, starts[1:], strict=False))
        wall, own = ([1000 * (b[i] - a[i]) for a, b in pairs] for i in range(2))
        return wall, own


def measure(name: str, given: argparse.Namespace) -> None:
    """Train by one strategy, and print a line of the table."""
    L.seed_everything(1, verbose=False)
    kind, _, devices = name.partition(":")
    accumulated = given.microbatches if kind == "accumulated" else 1
    size = given.samples // accumulated
    num_samples = (_NUM_WARM + given.batches) * given.samples
    data = DataLoader(TensorDataset(torch.randn(num_samples, 16)), size)
    times = BatchTimes(accumulated)
    trainer = L.Trainer(
        strategy=strategy_of(kind, given.microbatches),
        devices=int(devices),
        accelerator="cpu",
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(TinyNet(given.logs), data)
    if trainer.is_global_zero:
        wall, own = times.between()
        figures = (statistics.median(wall), statistics.quantiles(wall, n=10)[0])
        row = [f"{figure:.2f}" for figure in (*figures, statistics.median(own))]
        print(_ROW.format(name, *row), flush=True)


def strategy_of(kind: str, num_microbatches: int) -> Any:
    """Return what the trainer takes for a name in the table."""
    if kind == "pipeoffload":
        return PipeOffloadStrategy(num_microbatches=num_microbatches)
    return "auto" if kind in ("plain", "accumulated") else kind


def read_arguments(line: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--samples", type=int, default=16, help="of a batch, on each rank of ddp")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--logs", action="store_true", help="log the loss in each step")
    names = ["plain:1", "accumulated:1", "pipeoffload:1", "ddp:2", "pipeoffload:2"]
    parser.add_argument("--runs", nargs="+", default=names, help="strategy:ranks")
    return parser.parse_args(line)


def main(line: Sequence[str]) -> None:
    """Measure one run here; several each in processes of its own."""
    given = read_arguments(line)
    if len(given.runs) == 1:
        warnings.filterwarnings("ignore")
        for name in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(name).setLevel(logging.ERROR)
        torch.set_num_threads(1)
        measure(given.runs[0], given)
        return
    print(_ROW.format("run", "median ms", "tenth ms", "cpu ms"), flush=True)
    for name in given.runs:
        subprocess.run([sys.executable, __file__, *line, "--runs", name], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])

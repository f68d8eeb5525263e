"""What reading costs where one process reads for all ranks: seconds of a batch, and who has read.

    python examples/benchmarks/reading.py
    python examples/benchmarks/reading.py --ranks 4 --megabytes 150 --shares 0 1
    python examples/benchmarks/reading.py --apart    # as between machines: no shared memory

Blocks sleep in place of computing, and workers in place of decoding, so a busy machine changes
little. A row has the seconds from one batch to the next with a loader that takes a share of a step
for each batch, over the longer of the two; and the processes that have started workers.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.runtime.comm import batch_channel

_NUM_WARM = 6  # batches at the start, with probes and plans
_SAMPLES = 8
_NUM_NODES = int(os.environ.get("SLURM_NNODES", "1"))  # of an srun of one row, by --step
_ROW = "{:>6}{:>12}{:>8}{:>10}{:>10}{:>9}{:>9}"


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """Batches of so many bytes, each with the process that has started the worker.

    All are one tensor in shared memory, so that neither workers nor the loader copy anything.

    Args:
        count: Their number.
        num_bytes: The bytes of each sample.
        seconds: How long it takes to read one.
    """

    def __init__(self, count: int, num_bytes: int, seconds: float) -> None:
        self._count, self._seconds = count, seconds
        self._batch = torch.ones(_SAMPLES, num_bytes, dtype=torch.uint8).share_memory_()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._seconds)
        return self._batch, torch.full((_SAMPLES,), os.getppid())


class Sleep(nn.Module):
    """A block that sleeps."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Return a small layer's result, later."""
        time.sleep(self.seconds)
        return x + self.linear(x)


class Net(L.LightningModule):
    """As many sleeping blocks as ranks; notes when batches start and who has read them."""

    def __init__(self, num_blocks: int, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sleep(seconds) for _ in range(num_blocks))
        self.starts: list[float] = []
        self.readers: set[int] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return a loss of the batch's first bytes."""
        x = batch[0][:, :8].float()
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the time."""
        self.starts.append(time.perf_counter())
        self.readers |= {*batch[1].tolist()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Use plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def seconds_of(given: argparse.Namespace, share: float, step: float) -> tuple[float, int]:
    """Return the seconds of a batch, and the number of processes that have read."""
    num_bytes = int(given.megabytes * 1e6 / _SAMPLES)
    data = Batches(_NUM_WARM + given.batches, num_bytes, share * step * given.workers)
    net = Net(given.ranks, given.seconds)
    trainer = L.Trainer(
        strategy=PipeOffloadStrategy(num_microbatches=_SAMPLES, schedule="zb_h1"),
        devices=given.ranks // _NUM_NODES,
        num_nodes=_NUM_NODES,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(data, None, num_workers=given.workers))
    starts = net.starts[_NUM_WARM:]
    return statistics.median(b - a for a, b in zip(starts, starts[1:], strict=False)), len(
        net.readers
    )


def read_arguments(line: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.03, help="of a block's forward")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.065, 150.0])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--apart", action="store_true", help="send batches by messages alone")
    parser.add_argument("--step", type=float, help=argparse.SUPPRESS)
    return parser.parse_args(line)


def main(line: Sequence[str]) -> None:
    """Measure one row here; several each in processes of their own."""
    given = read_arguments(line)
    if given.step is not None:
        warnings.filterwarnings("ignore")
        for name in ("lightning.pytorch", "lightning.fabric", "lightning_pipeoffload"):
            logging.getLogger(name).setLevel(logging.ERROR)
        torch.set_num_threads(1)
        if given.apart:
            # As where no process can map the reader's memory: on another machine.
            batch_channel.read_memory_file = lambda path: b""
        (given.ranks,), (given.megabytes,), (share,) = given.ranks, given.megabytes, given.shares
        seconds, num_readers = seconds_of(given, share, given.step)
        if not int(os.environ.get("SLURM_PROCID", os.environ.get("LOCAL_RANK", "0"))):
            print("row", seconds, num_readers, flush=True)
        return
    print(_ROW.format("ranks", "megabytes", "share", "step s", "batch s", "over", "readers"))
    for ranks in given.ranks:
        step = _measure(line, ranks, min(given.megabytes), 0.0, 1.0)[0]
        for megabytes in given.megabytes:
            for share in given.shares:
                seconds, readers = _measure(line, ranks, megabytes, share, step)
                over = seconds / max(step, share * step)
                figures = f"{share:.1f}", f"{step:.3f}", f"{seconds:.3f}", f"{over:.3f}", readers
                print(_ROW.format(ranks, megabytes, *figures), flush=True)


def _measure(
    line: Sequence[str], ranks: int, megabytes: float, share: float, step: float
) -> tuple[float, int]:
    chosen = ["--ranks", ranks, "--megabytes", megabytes, "--shares", share, "--step", step]
    command = [sys.executable, __file__, *line, *map(str, chosen)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (row,) = (each for each in done.stdout.splitlines() if each.startswith("row "))
    _, seconds, readers = row.split()
    return float(seconds), int(readers)


if __name__ == "__main__":
    main(sys.argv[1:])

"""What each replica keeps of the optimizer, and takes of memory, without and with sharding.

Two replicas of one rank train a few layers of about 400 MiB with AdamW, once with
``sharding="none"`` and once with ``sharding="optimizer"``, in the same run.

    python -m examples.benchmarks.replicas_memory
    python -m examples.benchmarks.replicas_memory --replicas 4 --bytes_text 200
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import LightningModule
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.benchmarks.quiet_trainer import quiet_trainer
from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.runtime.leaves import tensors_in

NUM_BLOCKS = 25
NUM_STEPS = 3
BATCH_SIZE = 2
MEBIBYTE = 2**20


class Model(LightningModule):
    """Square layers, whose width follows from the size of all of them."""

    def __init__(self, bytes_text: float) -> None:
        super().__init__()
        width = int((bytes_text * MEBIBYTE / 4 / NUM_BLOCKS) ** 0.5)
        self.width = width
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(NUM_BLOCKS))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        """Return the mean square of the last layer's output."""
        for block in self.blocks:
            x = block(x).tanh()
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW, which keeps twice the parameters."""
        return torch.optim.AdamW(self.parameters())


def rank_main(args: argparse.Namespace) -> None:
    """Train on this rank, and say what it keeps."""
    warnings.filterwarnings("ignore")
    strategy = PipeOffloadStrategy(
        pipeline_parallel_size=1, data_parallel_size=args.replicas, sharding=args.sharding
    )
    trainer = quiet_trainer(
        devices=args.replicas,
        strategy=strategy,
        max_epochs=1,
    )
    module = Model(args.bytes_text)
    samples: Any = torch.randn(NUM_STEPS * BATCH_SIZE * args.replicas, module.width)
    trainer.fit(module, DataLoader(samples, batch_size=BATCH_SIZE))
    kept = sum(t.nbytes for t in tensors_in([*trainer.optimizers[0].state.values()]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    of_ranks: list[Any] = [None] * args.replicas
    dist.all_gather_object(of_ranks, (kept, peak))
    if dist.get_rank() == 0:
        said = sum(strategy.report()["memory"]["optimizer"])
        Path(args.results).write_text(json.dumps({"of_ranks": of_ranks, "said": said}))


def run_ranks(sharding: str) -> dict[str, Any]:
    """Train with one kind of sharding; Lightning starts this script again for the other ranks."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "examples.benchmarks.replicas_memory", *sys.argv[1:]]
        options = ["--sharding", sharding, "--results", str(results)]
        subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(results.read_text())
    return found


def print_table(args: argparse.Namespace) -> None:
    """Print what each replica keeps."""
    table = Table(
        "sharding", title=f"{args.replicas} replicas, {args.bytes_text:g} MiB of parameters; MiB"
    )
    for name in ("optimizer state", "estimated", "of unsharded", "peak of the process"):
        table.add_column(name, justify="right")
    unsharded = 0.0
    for sharding in ("none", "optimizer"):
        found = run_ranks(sharding)
        kept, peak = (max(values) / MEBIBYTE for values in zip(*found["of_ranks"], strict=True))
        unsharded = unsharded or kept
        said = found["said"] / MEBIBYTE
        figures = f"{kept:.1f}", f"{said:.1f}", f"{kept / unsharded:.3f}", f"{peak:.0f}"
        table.add_row(sharding, *figures)
    Console(width=100).print(table)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--bytes_text", type=float, default=400, help="of parameters")
    parser.add_argument("--sharding", default="none", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.results:
        rank_main(args)
    else:
        print_table(args)


if __name__ == "__main__":
    main()

"""Bytes that replicas send in a step, counted on the loopback interface, and their memory.

    python -m examples.benchmarks.replica_bytes [--replicas 4]

Each row is a Trainer over so many processes on this machine, which send over gloo: Lightning's DDP,
and replicas of one rank, without sharding and with ``sharding="optimizer"``. "sent" is what a rank
sends in a step, over the bytes of its gradients. FSDP2 is not run: its row is what a reduce-scatter
and one gather of the weights send. "kept" are the bytes of gradients after a step, and "peak" is
the highest resident memory above that before the first step, each of the replica that has most, in
MiB; glibc is told to keep nothing that is free. The exit status is 1 where sharding sends more than
5 % above (R-1)/R of gradients and weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.benchmarks.harness import quiet_trainer, run_ranks, write_results
from examples.benchmarks.memory import KEEP_NOTHING, MIB, print_table, take_peak
from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.runtime.shapes import ShapeOnly

KINDS = "ddp", "none", "optimizer"
WARM_STEPS, NUM_STEPS = 3, 8
MOST_ABOVE = 0.05


def sent_bytes() -> int:
    """Return the bytes that the loopback interface has sent since the machine started."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (numbers,) = (line.split(":")[1] for line in lines if line.strip().startswith("lo:"))
    return int(numbers.split()[8])


class Chain(LightningModule):
    """Equal blocks, whose weights are most of what is sent."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8))
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return a loss."""
        loss: Tensor = self.blocks(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())


class Counts(Callback):
    """Counts what is sent from one step to another, and the memory of gradients.

    Attributes:
        sent: Bytes that all ranks have sent in a step.
        kept: Bytes of gradients on this rank after a step.
        peak: MiB.
    """

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        """Begin to count."""
        if trainer.global_step == 0:
            self._base = take_peak()
        if trainer.global_step == WARM_STEPS:
            dist.barrier()
            self._before = sent_bytes()
            take_peak()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        """End when all ranks have ended their last step."""
        if trainer.global_step == WARM_STEPS + NUM_STEPS:
            own = [p.grad for p in module.parameters() if not isinstance(p.grad, ShapeOnly)]
            self.kept = sum(gradient.nbytes for gradient in own if gradient is not None)
            self.peak = take_peak() - self._base
            dist.barrier()
            self.sent = (sent_bytes() - self._before) / NUM_STEPS


def measure(kind: str, num_replicas: int, width: int) -> dict[str, Any]:
    """Train on this rank; return the figures of one row on all ranks."""
    torch.manual_seed(1)
    strategy: Strategy = (
        DDPStrategy(process_group_backend="gloo")
        if kind == "ddp"
        else PipeOffloadStrategy(
            data_parallel_size=num_replicas, sharding=kind, num_microbatches=2, schedule="1f1b"
        )
    )
    counts, module = Counts(), Chain(width)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=num_replicas,
        max_steps=WARM_STEPS + NUM_STEPS,
        callbacks=[counts],
    )
    data = TensorDataset(torch.randn(16 * num_replicas * (WARM_STEPS + NUM_STEPS), width))
    trainer.fit(module, DataLoader(data, 16))
    num_bytes = sum(p.nbytes for p in module.parameters())
    ranks: list[Any] = [None] * num_replicas
    dist.all_gather_object(ranks, (counts.kept / MIB, counts.peak))
    kept, peak = map(max, zip(*ranks, strict=True))
    name = kind if kind == "ddp" else f"sharding={kind}"
    sent = counts.sent / num_replicas / num_bytes
    return {"strategy": name, "sent": sent, "kept": kept, "peak": peak}


def main(line: Sequence[str] | None = None) -> int:
    """Measure each row in processes of its own, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    given = parser.parse_args(line)
    num_replicas, width = given.replicas, given.width
    if given.results:
        write_results(lambda: measure(given.kind, num_replicas, width), given.results)
        return 0
    sizes = "--replicas", str(num_replicas), "--width", str(width)
    rows = [
        run_ranks("replica_bytes", *sizes, "--kind", kind, environment=KEEP_NOTHING)
        for kind in KINDS
    ]
    least = 2 * (num_replicas - 1) / num_replicas
    print_table([*rows, {"strategy": "FSDP2 (formula)", "sent": least, "kept": "", "peak": ""}])
    return int(rows[-1]["sent"] > least * (1 + MOST_ABOVE))


if __name__ == "__main__":
    sys.exit(main())

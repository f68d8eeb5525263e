"""What of the reduction over replicas a step shows: REDUCE in the plan, or everything at the end.

Replicas of a pipeline train a module whose blocks sleep, and have gradients of a given size, over
gloo on this machine. Steps of three kinds take turns in one run: without a reduction, with REDUCE
as it is planned, and with all of it when the last W has run. What a step takes longer than one
without is exposed; beside it is what the sum of one block's gradient takes, which is one bucket.

    python -m examples.benchmarks.replicas
    python -m examples.benchmarks.replicas --p 4 --replicas 2 --bytes_text 2 --schedules zb_h1
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.benchmarks.quiet_trainer import quiet_trainer
from lightning_pipeoffload import PipeOffloadStrategy, defer_weight_grad

FEATURES = 256
BLOCKS_PER_RANK = 4
NUM_WARM_UP_TURNS = 2
KINDS = ("without", "planned", "at the end")


class _Sleep(torch.autograd.Function):
    """The identity, after a while in F and B; the weight's gradient takes as long in W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.weight, ctx.seconds = weight, seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        weight, seconds = ctx.weight, ctx.seconds

        def compute() -> Tensor:
            time.sleep(seconds)
            return torch.zeros_like(weight)

        time.sleep(seconds)
        defer_weight_grad(weight, compute)
        return gradient, None, None


class Block(nn.Module):
    """A block whose F, B and W take as long, with a weight of a given size."""

    def __init__(self, seconds: float, bytes_text: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(int(bytes_text * 2**18)))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``."""
        return _Sleep.apply(x, self.weight, self.seconds)


class Model(LightningModule):
    """A chain of blocks; no optimizer state, no work in the step."""

    def __init__(self, num_blocks: int, seconds: float, bytes_text: float) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(Block(seconds, bytes_text) for _ in range(num_blocks))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        """Return the mean of the last block's output."""
        x = x * self.start
        for block in self.blocks:
            x = block(x)
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _AtTheEnd:
    """A reduction that is told of no final gradient, and so starts when it is waited for."""

    def __init__(self, reduction: Any) -> None:
        self.wait = reduction.wait
        self.abandon = reduction.abandon

    def expect(self, stage: int, coming: Iterable[Tensor] = ()) -> None:
        """Do nothing."""

    def finish(self, parameter: Tensor) -> None:
        """Do nothing."""


class TakingTurns(Callback):
    """Lets each step be of the next kind, and times it up to the end of its reduction.

    Attributes:
        seconds: Of each kind, this rank's steps.
        bucket: Seconds of the sum of one block's gradient.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.bucket: list[float] = []
        self._reductions: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        """Start a step of the next kind together."""
        run = trainer.strategy.run  # type: ignore[attr-defined] # our own
        if run.reduction is not None and not self._reductions:
            plain = run.reduction
            self._reductions = {"without": None, "planned": plain, "at the end": _AtTheEnd(plain)}
        self._kind = KINDS[index % len(KINDS)]
        if self._reductions:
            run.reduction = self._reductions[self._kind]
        dist.barrier()
        self._began = time.perf_counter()

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        """End the step; then time one bucket."""
        self.seconds[self._kind].append(time.perf_counter() - self._began)
        dist.barrier()
        replicas = trainer.strategy.group.replicas  # type: ignore[attr-defined] # our own
        weight = next(p for p in module.blocks.parameters() if type(p) is nn.Parameter)
        gradient = torch.zeros_like(weight)
        began = time.perf_counter()
        replicas.start_sum(gradient)()
        self.bucket.append(time.perf_counter() - began)


def measure(schedule: str, args: argparse.Namespace) -> dict[str, float]:
    """Train on this rank; return the median milliseconds of each kind, over all ranks."""
    turns = TakingTurns()
    num_blocks = BLOCKS_PER_RANK * args.p
    trainer = quiet_trainer(
        devices=args.p * args.replicas,
        strategy=PipeOffloadStrategy(
            pipeline_parallel_size=args.p,
            data_parallel_size=args.replicas,
            schedule=schedule,
            num_microbatches=2 * args.p,
            split="even",
        ),
        max_epochs=1,
        callbacks=[turns],
    )
    num_steps = len(KINDS) * (args.turns + NUM_WARM_UP_TURNS)
    samples: Any = torch.zeros(num_steps * 2 * args.p * args.replicas, FEATURES)
    module = Model(num_blocks, args.milliseconds / 1e3 / BLOCKS_PER_RANK, args.bytes_text)
    trainer.fit(module, DataLoader(samples, batch_size=2 * args.p))
    mine = {**turns.seconds, "one bucket": turns.bucket[len(KINDS) * NUM_WARM_UP_TURNS :]}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    return {name: _median_of_slowest([found[name] for found in of_ranks]) for name in mine}


def _median_of_slowest(of_ranks: list[list[float]]) -> float:
    """Return milliseconds: a step is over when it is on all ranks."""
    slowest = [max(step) for step in zip(*of_ranks, strict=True)]
    return 1e3 * median(slowest[NUM_WARM_UP_TURNS:])


def run_ranks(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure all schedules; Lightning starts this script again for the other ranks."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "examples.benchmarks.replicas", *sys.argv[1:]]
        subprocess.run([*command, "--results", str(results)], check=True, stdout=subprocess.DEVNULL)
        measured: dict[str, dict[str, float]] = json.loads(results.read_text())
    return measured


def rank_main(args: argparse.Namespace) -> None:
    """Measure on one rank."""
    warnings.filterwarnings("ignore")
    measured = {schedule: measure(schedule, args) for schedule in args.schedules}
    if dist.get_rank() == 0:
        Path(args.results).write_text(json.dumps(measured))


def print_table(measured: dict[str, dict[str, float]], args: argparse.Namespace) -> None:
    """Print what is exposed of the reduction, by schedule."""
    size = BLOCKS_PER_RANK * args.bytes_text
    table = Table(
        "schedule",
        title=f"{args.replicas} replicas of {args.p} ranks, {size:g} MiB of gradients each",
        caption=f"ms; F, B and W of a rank take {args.milliseconds:g}; medians of {args.turns}",
    )
    for name in ("step without", "exposed: planned", "exposed: at the end", "one bucket"):
        table.add_column(name, justify="right")
    for schedule, took in measured.items():
        exposed = [took[kind] - took["without"] for kind in KINDS[1:]]
        figures = (took["without"], *exposed, took["one bucket"])
        table.add_row(schedule, *(f"{figure:.1f}" for figure in figures))
    Console(width=110).print(table)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--p", type=int, default=4, help="ranks of a pipeline")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--bytes_text", type=float, default=2, help="of one block's gradient")
    parser.add_argument("--milliseconds", type=float, default=40, help="of a rank's F, B or W")
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_h1", "zb_v"])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.results:
        rank_main(args)
    else:
        print_table(run_ranks(args), args)


if __name__ == "__main__":
    main()

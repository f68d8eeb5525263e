"""What the benchmarks share: blocks that sleep, a quiet Trainer, clocks, and runs over ranks.

Blocks sleep through their F, B and W, so that many ranks run on a few cores, and what remains is
the runtime: choosing the next action, starting it, sending, waiting.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_pipeoffload import defer_weight_grad

FEATURES = 1024  # a message of 4 KiB
PR_SET_TIMERSLACK = 29  # of linux/prctl.h

Deferral = Callable[[Tensor, Callable[[], Tensor]], None]


class Sleep(torch.autograd.Function):
    """The identity, after a while in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Return a copy after so many seconds."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient after as many."""
        time.sleep(ctx.seconds)
        return gradient, None


class SleepForWeight(torch.autograd.Function):
    """The identity; its gradient takes a while, at once or when ``defer`` asks for it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float, defer: Deferral | None) -> Tensor:
        """Return a copy."""
        ctx.weight, ctx.seconds, ctx.defer = weight, seconds, defer
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        """Return the gradient after so many seconds, or leave it to ``defer``."""

        def compute() -> Tensor:
            time.sleep(ctx.seconds)
            return gradient.clone()

        if ctx.defer is None:
            return compute(), None, None
        ctx.defer(ctx.weight, compute)
        return None, None, None


class EmulatedBlock(nn.Module):
    """A block whose F and B take equally long, and by default its W too.

    Args:
        seconds: Of each.
        defer: Takes the computation of a weight gradient; None: autograd computes it.
        weight_share: Seconds of W, as a share of F's; next to nothing where only adapters train.
        num_weights: Weights, each of which has its share of W.
    """

    def __init__(
        self,
        seconds: float,
        defer: Deferral | None,
        weight_share: float = 1.0,
        num_weights: int = 1,
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(FEATURES) for _ in range(num_weights))
        self.seconds = seconds
        self.weight_seconds = seconds * weight_share / num_weights
        self.defer = defer

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` plus the weights."""
        y: Tensor = Sleep.apply(x, self.seconds)
        for weight in self.weights:
            y = y + SleepForWeight.apply(weight, self.weight_seconds, self.defer)
        return y


class EmulatedModel(LightningModule):
    """A chain of such blocks, as a user of Lightning would write it."""

    def __init__(
        self, num_blocks: int, seconds: float, weight_share: float = 1.0, num_weights: int = 1
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            EmulatedBlock(seconds, defer_weight_grad, weight_share, num_weights)
            for _ in range(num_blocks)
        )

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        """Return the mean of the last block's output."""
        for block in self.blocks:
            x = block(x)
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def quiet_trainer(**options: Any) -> Trainer:
    """Return a Trainer on CPUs that writes no log, no checkpoint and no progress."""
    return Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


class Moment(NamedTuple):
    """Seconds on this process's clocks; ``busy`` counts those in which its threads had a core."""

    wall: float
    busy: float

    @classmethod
    def now(cls) -> Moment:
        """Read the clocks."""
        return cls(time.perf_counter(), time.process_time())


class StepTimes:
    """When the steps of a run began on this rank.

    Args:
        has_barrier: Whether all ranks wait for each other before each step. A step then lasts from
            the first rank's start to the last rank's end, else from its start to the next one's.
    """

    def __init__(self, has_barrier: bool = False) -> None:
        self._has_barrier = has_barrier
        self._marks: list[tuple[Moment, Moment]] = []  # the end of a step, the start of the next

    def note(self) -> None:
        """Note that a step begins."""
        ended = Moment.now()
        if self._has_barrier:
            dist.barrier()
        self._marks.append((ended, Moment.now()))

    def take(self, num_steps: int) -> Moment:
        """Return the seconds of a step and, as a mean over the ranks, of their threads.

        All ranks call it. It reads the last ``num_steps`` steps that have both ends, and forgets
        all.
        """
        own, self._marks = self._marks[-1 - num_steps :], []
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        if not self._has_barrier:
            spans = [marks[-1][1].wall - marks[0][1].wall for marks in ranks]
            busy = [marks[-1][1].busy - marks[0][1].busy for marks in ranks]
            return Moment(max(spans) / num_steps, mean(busy) / num_steps)
        steps = [*zip(*ranks, strict=True)]
        walls, of_threads = [], []
        for starts, ends in zip(steps, steps[1:], strict=False):
            both = [*zip(starts, ends, strict=True)]
            walls.append(max(end.wall for end, _ in ends) - min(start.wall for _, start in starts))
            of_threads.append(mean(end.busy - start.busy for (_, start), (end, _) in both))
        return Moment(median(walls), median(of_threads))


def sleep_on_time() -> None:
    """Have this process woken within a nanosecond, not 50 us, of when its sleep is over."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)


def run_ranks(module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Any:
    """Run a benchmark's ranks in processes of their own; return what global rank 0 found.

    Lightning starts the same command again for the other ranks.

    Args:
        module: The benchmark, which is given ``--results`` as well, for ``write_results``.
        *arguments: Its command line.
        environment: Variables in addition to this process's own.
    """
    command = [sys.executable, "-m", f"examples.benchmarks.{module}", *arguments]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        subprocess.run(
            [*command, "--results", str(results)],
            check=True,
            stdout=subprocess.DEVNULL,  # tables of each run's stages
            env={**os.environ, **(environment or {})},
        )
        return json.loads(results.read_text())


def write_results(measure: Callable[[], Any], results: str) -> None:
    """Measure on this rank, which ``run_ranks`` has started, and write what was found."""
    sleep_on_time()
    warnings.filterwarnings("ignore")
    found = measure()
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(found))

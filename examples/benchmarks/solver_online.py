"""What a solver's plan gains while training goes on, in a real Trainer.

Blocks sleep through F, B and W, so that many ranks run on a few cores. Each keeps one tensor for
its backward, and ``memory_limit`` is a few of these; a thread copies them to the host and back, one
at a time, as long as a link of a given speed would take. The first steps measure, the best family
of schedules runs, and the solver beside it looks for better plans, each adopted between two steps.
A line for each plan says how long a step should take by it, and how long it took: medians of the
periods on global rank 0, without the first two.

    python -m examples.benchmarks.solver_online --seconds 30
    python -m examples.benchmarks.solver_online --seconds 30 --long 2 --clip 1.0

With ``--clip`` ranks wait for each other between two steps, for the norm, and what counts is one
step alone.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.benchmarks.emulated import FEATURES, EmulatedModel, sleep_on_time
from examples.benchmarks.quiet_trainer import quiet_trainer
from lightning_pipeoffload import PipeOffloadStrategy, defer_weight_grad
from lightning_pipeoffload.planning import measurements
from lightning_pipeoffload.runtime.measure.link_speed import CopySpeed
from lightning_pipeoffload.runtime.memory.streams import CopyLanes, LateLane

SECONDS = 0.030, 0.029, 0.020  # of F, B and W
ROWS = 16  # of a microbatch
ACTIVATION = ROWS * FEATURES * 4  # bytes
LONGER = 1.5
UNCOUNTED = 2  # steps of each plan: ranks have yet to settle


class _Timed(torch.autograd.Function):
    """The sum with a weight: takes a while forward, and another one backward; W takes its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: tuple[float, float, float]) -> Tensor:
        ctx.seconds, ctx.weight = seconds, weight
        time.sleep(seconds[0])
        return x + weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _, of_input, of_weight = ctx.seconds

        def compute() -> Tensor:
            time.sleep(of_weight)
            return gradient.sum(0)

        time.sleep(of_input)
        defer_weight_grad(ctx.weight, compute)
        return gradient, None, None


class Block(nn.Module):
    """A block that sleeps, and keeps one tensor."""

    def __init__(self, times_as_long: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES))
        forward, of_input, of_weight = (times_as_long * seconds for seconds in SECONDS)
        self.seconds = forward, of_input, of_weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the sine of what sleeps, for which it is kept."""
        return _Timed.apply(x, self.weight, self.seconds).sin()


class Chain(EmulatedModel):
    """A chain of blocks.

    Args:
        num_blocks: How many.
        long: Which of them takes longer; None: none.
    """

    def __init__(self, num_blocks: int, long: int | None) -> None:
        super().__init__(0, 0.0)
        self.blocks.extend(Block(LONGER if block == long else 1.0) for block in range(num_blocks))


@dataclass
class Run:
    """Steps by one plan: what it promises, and when they began."""

    promised: float
    starts: list[float] = field(default_factory=list)

    @property
    def measured(self) -> float | None:
        """The median of the periods that count; None before there is one."""
        pairs = list(zip(self.starts, self.starts[1:], strict=False))[UNCOUNTED:]
        return median(b - a for a, b in pairs) if pairs else None


class Plans(Callback):
    """Notes which plan ran when, from the first one on that was made by measured costs.

    Attributes:
        runs: One for each plan.
    """

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._in_use: Any = None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Note that a step has ended, and the next one begins."""
        strategy: Any = trainer.strategy
        report = strategy.report()
        if report["k"] is None:  # nothing is measured yet
            return
        if strategy.plan is not self._in_use:
            self._in_use = strategy.plan
            self.runs.append(Run(report["period"]))
        self.runs[-1].starts.append(time.perf_counter())


def link_of(bytes_per_second: float) -> None:
    """Let copies take as long as over a link of that speed, in plan and step."""

    def make_lanes(device: torch.device, count: int = 1) -> CopyLanes:
        lane = LateLane(lambda num_bytes: time.sleep(num_bytes / bytes_per_second))
        return CopyLanes(lane, lane)

    vars(measurements)["make_lanes"] = make_lanes
    vars(measurements)["measure_copy_speed"] = lambda *_, **__: CopySpeed(
        bytes_per_second, bytes_per_second, overlap=1.0
    )


def main() -> None:
    """Train, and print a line for each plan."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--p", type=int, default=4, help="ranks")
    parser.add_argument("--m", type=int, default=8, help="microbatches")
    parser.add_argument("--limit", type=float, default=2.0, help="activations of a rank")
    parser.add_argument("--long", type=int, help="the block that takes half as long again")
    parser.add_argument("--copies", type=float, default=20.0, help="milliseconds of each copy")
    parser.add_argument("--clip", type=float, help="the norm that gradients are clipped to")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the solver")
    parser.add_argument("--steps", type=int, default=80)
    given = parser.parse_args()
    sleep_on_time()
    warnings.filterwarnings("ignore")
    plans = Plans()
    link_of(ACTIVATION / given.copies * 1e3)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # nothing was found before
        strategy = PipeOffloadStrategy(
            schedule="optpipe",
            num_microbatches=given.m,
            memory_limit=round(given.limit * ACTIVATION),
            split="even",
            solver_seconds=given.seconds,
        )
        trainer = quiet_trainer(
            devices=given.p,
            strategy=strategy,
            max_steps=given.steps,
            gradient_clip_val=given.clip,
            callbacks=[plans],
        )
        samples: Any = torch.ones(given.steps * given.m * ROWS, FEATURES)
        trainer.fit(Chain(given.p, given.long), DataLoader(samples, batch_size=given.m * ROWS))
    if trainer.global_rank == 0:
        show(plans.runs)


def show(runs: list[Run]) -> None:
    """Print the table."""
    print("| plan | steps | promised, ms | measured, ms | less than the family's |")
    print("|---|---|---|---|---|")
    measured = [run.measured for run in runs]
    for place, (run, took) in enumerate(zip(runs, measured, strict=True)):
        name = f"solver's {place}" if place else "best family"
        cells = ["", ""]
        if took is not None:
            cells = [f"{1e3 * took:.1f}", f"{1 - took / measured[0]:.1%}" if measured[0] else ""]
        print(f"| {name} | {len(run.starts)} | {1e3 * run.promised:.1f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

"""Whether copies that are hidden in the plan are hidden when it runs, without an accelerator.

    python -m examples.benchmarks.offload_emulated

One rank of a longer pipeline whose blocks sleep in F, B and W, and whose copies take as long as a
link of a given speed would: a thread runs them, both directions in turn. The neighbours answer as
the plan says. So all that is left of a step is what waits for what, which is
the runtime's own code. "over none" is the step over that without offload in the same run; sleeping
and waking up are in both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from examples.benchmarks.harness import FEATURES, EmulatedBlock
from examples.benchmarks.late_lane import LateLane
from lightning_pipeoffload import defer_weight_grad
from lightning_pipeoffload.cli.rehearsal import AbsentNeighbours
from lightning_pipeoffload.runtime.cut import CutSettings
from lightning_pipeoffload.runtime.device import ActionTimer, CopyLanes
from lightning_pipeoffload.runtime.memory import HostMemory, OffloadSettings
from lightning_pipeoffload.runtime.run import (
    ActivationMemory,
    Executor,
    Pipeline,
    split_into_microbatches,
)
from lightning_pipeoffload.runtime.step import set_indices_and_weights
from lightning_pipeoffload.schedule import (
    Costs,
    Schedule,
    build,
    lower,
    offload_activations,
    simulate,
)

CPU = torch.device("cpu")
ROWS = 16  # of a microbatch: 64 KiB for each stage
ACTIVATION = ROWS * FEATURES * 4


@dataclass(frozen=True)
class Setup:
    """A pipeline whose rank 0 runs here; ``seconds`` of each F, B and W."""

    num_ranks: int
    num_chunks: int
    num_microbatches: int
    seconds: float

    def costs(self, k: float) -> Costs:
        """Return what stages cost whose copies there and back take k times their computing."""
        one_way = k * 3 * self.seconds / 2
        return Costs(
            self.seconds,
            self.seconds,
            self.seconds,
            activation=ACTIVATION,
            weight_residue=0,
            weight_input=0,
            offload=one_way,
            reload=one_way,
        )


class SavingBlock(EmulatedBlock):
    """A block that sleeps, and saves one tensor; not its input, which may be the batch."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the sine of what sleeps."""
        return super().forward(x).sin()


class Model(torch.nn.Module):
    """A chain of blocks."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        blocks = (
            SavingBlock(setup.seconds, defer_weight_grad)
            for _ in range(setup.num_ranks * setup.num_chunks)
        )
        self.blocks = torch.nn.ModuleList(blocks)

    def step(self, x: Tensor) -> Tensor:
        """Return the mean of the last block's output."""
        for block in self.blocks:
            x = block(x)
        return x.mean()


def plan_of(setup: Setup, share: str, k: float) -> Schedule:
    numbers = setup.num_ranks, setup.num_microbatches, setup.num_chunks
    schedule = build("uniform", *numbers)
    if share == "none":
        return lower(schedule)
    return lower(offload_activations(schedule, setup.costs(k), share)[0])


def measure(setup: Setup, plan: Schedule, k: float, num_steps: int) -> tuple[float, int]:
    """Return the median seconds of a step of rank 0, and the peak of its saved bytes."""
    model, costs = Model(setup), setup.costs(k)
    bytes_per_second = ACTIVATION / costs.per_stage("offload", 1)[0] if k else float("inf")
    lane = LateLane(lambda num_bytes: time.sleep(num_bytes / bytes_per_second))
    memory = ActivationMemory(OffloadSettings(CPU, CopyLanes(lane, lane), HostMemory(pinned=False)))
    stage_ranks = tuple(plan.rank_of(stage) for stage in range(plan.num_stages))
    pipeline = Pipeline(model, 0, CutSettings(stage_ranks, "blocks", "even"), CPU)
    batch = torch.randn(ROWS * setup.num_microbatches, FEATURES)
    slices = split_into_microbatches(
        pipeline, batch, ROWS, lambda part, _: model.step(part), "train", 0
    )
    microbatches = set_indices_and_weights(slices)
    pipeline.commit()
    transport = AbsentNeighbours(plan, 0, costs, CPU)
    executor = Executor(0, pipeline.stages, transport, ActionTimer(CPU), memory)
    seconds = []
    for _ in range(num_steps + 1):
        started = time.perf_counter()
        transport.start_step()
        executor.run(plan, microbatches)
        seconds.append(time.perf_counter() - started)
    pipeline.detach()
    return median(seconds[1:]), memory.ledger.peak_device_bytes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Whether hidden copies stay hidden.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args(arguments)
    pipeline = options.ranks, options.chunks, options.microbatches
    setup = Setup(*pipeline, options.milliseconds / 1e3)
    print("| offload | k | step, ms | plan, ms | over none | peak, activations | plan's |")
    print("|---|---|---|---|---|---|---|")
    none = None
    for share, k in (("none", 0.0), ("half", 0.7), ("half", 1.0), ("full", 0.7), ("full", 1.0)):
        plan = plan_of(setup, share, k)
        timeline = simulate(plan, setup.costs(k))
        seconds, peak = measure(setup, plan, k, options.steps)
        none = none or seconds
        print(
            f"| {share} | {k:g} | {seconds * 1e3:.1f} | {timeline.span[0] * 1e3:.1f} "
            f"| {seconds / none:.3f} | {peak / ACTIVATION:g} "
            f"| {timeline.peak_memory[0] / ACTIVATION:g} |",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""What ranks with different work wait for each other, by FSDP2's collectives and on demand.

Blocks sleep, so ranks need no cores of their own. Every rank runs as many microbatches, of which
each is long on one rank and short on the others, or as long on all ("balanced"). Minibatches of
both kinds take turns in one run.

    python -m examples.benchmarks.on_demand
    python -m examples.benchmarks.on_demand --ranks 2 --turns 9
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

from examples.benchmarks.harness import Sleep
from lightning_pipeoffload.odc import OnDemandRun, ShardedGroup, SharedSums
from lightning_pipeoffload.processes import free_port
from lightning_pipeoffload.runtime.comm import HostGroup

WIDTH, NUM_BLOCKS = 64, 4
LONG, SHORT = 0.03, 0.003  # seconds of a block's forward, and of its backward
KINDS = ("collective", "on demand")


class SleepingBlock(nn.Module):
    """A small layer, and a sleep in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seconds: float) -> Tensor:
        """Return the layer's output after so many seconds."""
        return Sleep.apply(self.linear(x), seconds)


class SleepingNet(nn.Module):
    """Blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SleepingBlock() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor, seconds: float) -> Tensor:
        """Return a loss."""
        for block in self.blocks:
            x = block(x, seconds)
        return x.sum()


def sharded() -> nn.Module:
    module = SleepingNet()
    for block in module.blocks:
        fully_shard(block)
    fully_shard(module)
    return module


def microbatches(rank: int, num_ranks: int, balanced: bool) -> list[float]:
    """Return how long each block sleeps in each of a rank's microbatches."""
    return [LONG if balanced or turn % num_ranks == rank else SHORT for turn in range(4)]


def run_all(module: nn.Module, seconds: Sequence[float]) -> None:
    for each in seconds:
        module(torch.ones(2, WIDTH), each).backward()


def skewed(balanced: bool = False, turns: int = 3) -> dict[str, float]:
    """Time minibatches of both kinds on one of the ranks; return the median of each."""
    rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    world = HostGroup(dist.new_group(timeout=timedelta(minutes=2), backend="gloo"))
    seconds = microbatches(rank, num_ranks, balanced)
    plain, module = sharded(), sharded()

    def make_transport(groups: Sequence[ShardedGroup]) -> SharedSums:
        return SharedSums(groups, rank, world, torch.device("cpu"))

    run = OnDemandRun(module, world, make_transport)

    def collective() -> None:
        run_all(plain, seconds)
        world.barrier()

    def on_demand() -> None:
        run.open(adds_up=False)
        with run.on_demand():
            run_all(module, seconds)
        run.close(None, True)

    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(1 + turns):  # the first of each prepares what the others use
        for kind, call in zip(KINDS, (collective, on_demand), strict=True):
            times[kind].append(timed(call))
    run.end()
    return {kind: median(found[1:]) for kind, found in times.items()}


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _rank(rank: int, num_ranks: int, port: int, balanced: bool, turns: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    torch.set_num_threads(1)
    found = skewed(balanced, turns)
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def measure(num_ranks: int, balanced: bool, turns: int) -> dict[str, float]:
    results: Any = get_context("spawn").SimpleQueue()
    arguments = (num_ranks, free_port(), balanced, turns, results)
    spawn(_rank, arguments, num_ranks)
    found: dict[str, float] = results.get()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    columns = "ranks", "work", *(f"{kind} (s)" for kind in KINDS), "ratio"
    table = Table(*columns, title="one minibatch of four microbatches and four blocks")
    for num_ranks in options.ranks:
        for balanced in (False, True):
            found = measure(num_ranks, balanced, options.turns)
            seconds = [found[kind] for kind in KINDS]
            work = "balanced" if balanced else "skewed"
            cells = *(f"{each:.3f}" for each in seconds), f"{seconds[1] / seconds[0]:.2f}"
            table.add_row(str(num_ranks), work, *cells)
    Console().print(table)
    sys.stdout.flush()


if __name__ == "__main__":
    main()

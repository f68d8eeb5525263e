"""Unlike cards in one pipeline: the cut and plan that a run chooses, against the best there is.

    python -m examples.benchmarks.unlike_emulated
    python -m examples.benchmarks.unlike_emulated --only 1:2/8 1:1:2/16

Blocks sleep through F, B and W, on each rank as many times as long as its card is slower: 1:2 is
two cards of which the second, as the user counts them, takes twice as long. There are four blocks
for each card. "Even" is the best schedule of an even cut, and "best" that of any cut, both by the
simulator with the blocks' true times; cuts are tried in the order of their busiest ranks until no
further one can be faster. "Chosen" is the plan that was run by the same, "planned" what the
run promised before its first step by measured blocks, "measured" the time from one step to the
next.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from math import inf, prod
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from examples.benchmarks.harness import (
    FEATURES,
    EmulatedBlock,
    EmulatedModel,
    quiet_trainer,
    run_ranks,
    write_results,
)
from lightning_pipeoffload import PipeOffloadStrategy, defer_weight_grad
from lightning_pipeoffload.schedule import (
    FAMILIES,
    Costs,
    PlanOption,
    PlanRequest,
    ScheduleError,
    device_indices,
    make_plan,
    options,
    steady_period,
)

SPEEDS = ("1:2", "1:1:2", "1:1.5:2:3")
MICROBATCHES = (8, 16)
BLOCKS_OF_RANK = 4
SECONDS = 0.03  # of each F, B and W of a block on the fastest card
LATENCY = 0.001
NUM_STEPS = 4


class UnlikeBlock(EmulatedBlock):
    """A block that takes as many times as long as this process's card is slower."""

    def __init__(self, slowness: Sequence[float]) -> None:
        super().__init__(SECONDS, defer_weight_grad)
        self._slowness = slowness

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` plus the weights."""
        seconds = SECONDS * self._slowness[dist.get_rank()] if dist.is_initialized() else 0.0
        self.seconds = self.weight_seconds = seconds
        return super().forward(x)


class UnlikeModel(EmulatedModel):
    """A chain of such blocks; the first one has an input gradient to compute, too."""

    def __init__(self, slowness: Sequence[float]) -> None:
        super().__init__(0, 0.0)
        self.start = torch.nn.Parameter(torch.zeros(1))
        count = BLOCKS_OF_RANK * len(slowness)
        self.blocks.extend(UnlikeBlock(slowness) for _ in range(count))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        """Return the mean of the last block's output."""
        return super().training_step(x + self.start, batch_idx)


def factors(name: str) -> list[float]:
    """Return how many times as long each card takes."""
    return [float(part) for part in name.split(":")]


class NotedSamples(Dataset[Tensor]):
    """Samples; the first one of each batch notes when it is read, which a step waits for."""

    def __init__(self, batch_size: int, num_batches: int) -> None:
        self._sizes = batch_size, num_batches
        self.times: list[float] = []

    def __len__(self) -> int:
        return prod(self._sizes)

    def __getitem__(self, index: int) -> Tensor:
        if index % self._sizes[0] == 0:
            self.times.append(time.perf_counter())
        return torch.zeros(FEATURES)


def run(name: str, num_microbatches: int) -> dict[str, Any]:
    """Train on cards of these speeds; return what was chosen, planned and measured."""
    slowness = factors(name)
    strategy = PipeOffloadStrategy(num_microbatches=num_microbatches)
    trainer = quiet_trainer(strategy=strategy, devices=len(slowness), max_epochs=1)
    samples = NotedSamples(num_microbatches, NUM_STEPS + 3)
    trainer.fit(UnlikeModel(slowness), DataLoader(samples, batch_size=num_microbatches))
    report, times = strategy.report(), samples.times[-NUM_STEPS - 1 :]
    cut, placement = [len(stage["blocks"]) for stage in report["stages"]], strategy.plan.placement
    return {
        "schedule": f"{report['schedule']} x{report['num_chunks']}",
        "cut": cut,
        "chosen": steady_period(strategy.plan, costs_of(cut, placement, slowness), False),
        "planned": report["period"],
        "measured": (times[-1] - times[0]) / NUM_STEPS if times else 0.0,
    }


def costs_of(cut: Sequence[int], placement: Sequence[int], slowness: Sequence[float]) -> Costs:
    """Return what the stages of a cut truly cost."""
    places = device_indices(placement)
    of_stages = zip(cut, placement, strict=True)
    seconds = [SECONDS * count * slowness[places[rank]] for count, rank in of_stages]
    return Costs(seconds, seconds, seconds, LATENCY)


def cuts(num_blocks: int, num_stages: int) -> Iterator[list[int]]:
    """Yield all cuts of blocks into stages."""
    for ends in combinations(range(1, num_blocks), num_stages - 1):
        yield [end - start for start, end in pairwise((0, *ends, num_blocks))]


def period_of(option: PlanOption, num_ranks: int, costs: Costs) -> float:
    """Return the time from one step to the next; infinite without a plan."""
    try:
        period = make_plan(PlanRequest(num_ranks, [option], lambda option: costs)).best.period
    except ScheduleError:
        return inf
    return inf if period is None else period


def best_of_any(name: str, num_microbatches: int) -> tuple[float, float]:
    """Return the best period of an even cut, and of any, by the simulator."""
    slowness = factors(name)
    num_ranks, best, best_even = len(slowness), inf, inf
    for option in options([num_microbatches], most_chunks=2):
        if FAMILIES[option.schedule].takes_seconds or FAMILIES[option.schedule].order:
            continue
        placement = option.placement(num_ranks)
        count = BLOCKS_OF_RANK * num_ranks // len(placement)
        even = costs_of([count] * len(placement), placement, slowness)
        best_even = min(best_even, period_of(option, num_ranks, even))
        tried = []
        for cut in cuts(BLOCKS_OF_RANK * num_ranks, len(placement)):
            work = [0.0] * num_ranks
            forward = costs_of(cut, placement, slowness).per_stage("forward", len(placement))
            for seconds, rank in zip(forward, placement, strict=True):
                work[rank] += 3 * num_microbatches * seconds
            tried.append((max(work), cut))
        for busiest, cut in sorted(tried):
            if busiest >= best:
                break
            best = min(best, period_of(option, num_ranks, costs_of(cut, placement, slowness)))
    return best_even, best


HEADER = [
    *("cards", "m", "chosen", "blocks of stages", "even", "best", "chosen", "planned", "measured"),
    *("chosen / even", "chosen / best", "measured / best"),
]


def row(name: str, num_microbatches: int) -> list[str]:
    """Return the cells of a line."""
    even, best = best_of_any(name, num_microbatches)
    with TemporaryDirectory() as caches:  # what was measured on other cards says nothing
        setting, environment = f"{name}/{num_microbatches}", {"XDG_CACHE_HOME": caches}
        found = run_ranks("unlike_emulated", "--run", setting, environment=environment)
    chosen, measured = found["chosen"], found["measured"]
    seconds = even, best, chosen, found["planned"], measured
    shares = chosen / even, chosen / best, measured / best
    return [
        *(name, str(num_microbatches), found["schedule"]),
        " ".join(map(str, found["cut"])),
        *(f"{each * 1e3:.0f} ms" for each in seconds),
        *(f"{each:.2f}" for each in shares),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", help="settings, as 1:1:2/16")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        name, count = given.run.split("/")
        write_results(lambda: run(name, int(count)), given.results)
        return
    for cells in (HEADER, ["---"] * len(HEADER)):
        print(f"| {' | '.join(cells)} |")
    for setting in given.only or [f"{name}/{m}" for name in SPEEDS for m in MICROBATCHES]:
        name, count = setting.split("/")
        print(f"| {' | '.join(row(name, int(count)))} |", flush=True)


if __name__ == "__main__":
    main()

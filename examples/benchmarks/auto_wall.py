"""What ``schedule="auto"`` chooses on the wall: what it promises, what it takes, and what hands do.

    python -m examples.benchmarks.auto_choice --wall
    python -m examples.benchmarks.auto_choice --wall --only even/slow/tight uneven/fast/none

A setting takes a minute; as blocks sleep, parts of the table can be measured at the same time.
Real Trainers, one after the other in the same processes, train blocks that sleep 30 ms in each of
F, B and W, the one in the middle half as long again where blocks are uneven. A thread makes a
rank's copies as late as a link would: where links are fast, those of a rank's activations take two
thirds of its F each way, both ways at once; where they are slow, twice its F, one at a time. What
copies take is told and not measured, for on a CPU none waits for a thread. Limits are shares of
what 1F1B keeps.

By hand every family is built for the limit with what blocks truly take, with copies and without;
the best by the simulator run as schedules of their own. "Promised" is said before the first step,
"planned" by the plan in use at the end, which under a limit steps have been measured for. A time is
that from one step to the next, the mean of the last ones.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.benchmarks.auto_choice import LINKS, SHARES, SLOW_STAGE, plans_by_hand
from examples.benchmarks.emulated import TimedStrategy, alike_samples
from examples.benchmarks.harness import FEATURES, EmulatedModel, quiet_trainer, sleep_on_time
from examples.benchmarks.late_lane import LateLane
from examples.benchmarks.offload_emulated import SavingBlock
from lightning_pipeoffload import defer_weight_grad
from lightning_pipeoffload.planning import measurements
from lightning_pipeoffload.runtime.device import CopyLanes
from lightning_pipeoffload.runtime.measure import CopySpeed
from lightning_pipeoffload.runtime.run import rank_memory
from lightning_pipeoffload.schedule import (
    Costs,
    PlanOption,
    Schedule,
    options,
    split_fused_backward,
    steady_period,
)

ROWS, WIDTH = 16, 64
TENSOR_BYTES = ROWS * FEATURES * 4
BLOCKS_OF_RANK = 2
F_OF_LINKS = 30  # what a rank's F takes where LINKS say what copies do
HOP = 0.001  # of a message, for plans by hand
NUM_TO_SETTLE = 4  # steps: under a limit the first three are measured, and planned by


class MixingBlock(SavingBlock):
    """A block that sleeps, and saves two tensors: one that B needs, and one that waits for W.

    Args:
        seconds: Of each F, B and W.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds, defer_weight_grad)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what sleeps, mixed."""
        saved = super().forward(x)
        return self.mix(saved.unflatten(-1, (-1, WIDTH))).flatten(-2)


class MixingModel(EmulatedModel):
    """A chain of such blocks; the first one has an input gradient to compute, too.

    Args:
        seconds: Of each block's F, B and W.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        super().__init__(0, 0.0)
        self.start = nn.Parameter(torch.zeros(FEATURES))
        self.blocks.extend(map(MixingBlock, seconds))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        """Return the mean of the last block's output."""
        return super().training_step(x + self.start, batch_idx)


@dataclass(frozen=True)
class Setting:
    """One line of the table; ``seconds`` of a block's F, B and W."""

    num_ranks: int
    num_microbatches: int
    seconds: float
    is_even: bool
    link: str
    limit: str

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        return f"{'even' if self.is_even else 'uneven'}/{self.link}/{self.limit}"

    @property
    def block_seconds(self) -> list[float]:
        """Seconds of each block's F, B and W."""
        count = BLOCKS_OF_RANK * self.num_ranks
        longer = [1.0 if self.is_even or b != count // 2 else SLOW_STAGE for b in range(count)]
        return [self.seconds * times for times in longer]

    @property
    def memory_limit(self) -> int | None:
        """Bytes that a rank may keep."""
        share, of_rank = SHARES[self.limit], 2 * BLOCKS_OF_RANK * TENSOR_BYTES
        return None if share is None else int(share * self.num_ranks * of_rank)

    @property
    def speed(self) -> CopySpeed:
        """The speed of a rank's copies."""
        share, num_lanes = LINKS[self.link]
        seconds = share / F_OF_LINKS * self.seconds  # of a block's activation
        bytes_per_second = 2 * TENSOR_BYTES / seconds
        return CopySpeed(bytes_per_second, bytes_per_second, 1 / num_lanes)

    def costs_of(self, option: PlanOption) -> Costs:
        """Return what stages truly cost."""
        count, blocks = BLOCKS_OF_RANK // option.num_chunks, self.block_seconds
        seconds = [sum(blocks[start : start + count]) for start in range(0, len(blocks), count)]
        activation = 2 * count * TENSOR_BYTES
        copy = activation / self.speed.to_host
        return Costs(
            *(seconds, seconds, seconds, HOP),
            activation=activation,
            weight_residue=activation,
            weight_input=activation / 2,
            offload=copy,
            reload=copy,
            copy_lanes=self.speed.num_lanes,
        )

    def best_by_hand(self, count: int) -> list[ByHand]:
        """Return the best plans of so many families, by the simulator."""
        wanted = options([self.num_microbatches], BLOCKS_OF_RANK)
        found: dict[str, ByHand] = {}
        for option, plan, copies in plans_by_hand(
            wanted, self.num_ranks, self.costs_of, self.memory_limit
        ):
            runs = split_fused_backward(plan)
            seconds = steady_period(runs, self.costs_of(option), has_barrier=False)
            other = found.get(option.schedule)
            if other is None or seconds < other.seconds:
                found[option.schedule] = ByHand(option, copies, seconds, plan)
        return sorted(found.values(), key=lambda each: each.seconds)[:count]


class ByHand(NamedTuple):
    """A plan, and the seconds of its steps in the simulator."""

    option: PlanOption
    has_copies: bool
    seconds: float
    plan: Schedule

    @property
    def label(self) -> str:
        """What the table calls it."""
        return f"{self.option.schedule} x{self.option.num_chunks}{'+copies' * self.has_copies}"


class Run(NamedTuple):
    """What a Trainer took from one step to the next, and its report."""

    seconds: float
    report: dict[str, Any]


@contextmanager
def slow_copies(speed: CopySpeed) -> Iterator[None]:
    """Let copies of Trainers take as long as over a link of such a speed."""

    def make_lanes(device: torch.device, count: int = 2) -> CopyLanes:
        to_host, to_device = (
            LateLane(lambda num_bytes: time.sleep(num_bytes / speed.to_host)) for _ in range(2)
        )
        return CopyLanes(to_host, to_device if count == speed.num_lanes == 2 else to_host)

    # Private: these make the lanes of a rank; on a CPU of the package's own copies are at once.
    with (
        patch.object(rank_memory, "make_lanes", make_lanes),
        patch.object(measurements, "make_lanes", make_lanes),
        patch.object(measurements, "measure_copy_speed", lambda *_, **__: speed),
    ):
        yield


def train(setting: Setting, num_steps: int, schedule: str | Schedule) -> Run:
    """Train, and measure so many steps; a schedule that is given keeps the limit already."""
    strategy = TimedStrategy(
        schedule=schedule,
        num_microbatches=setting.num_microbatches,
        memory_limit=setting.memory_limit if schedule == "auto" else None,
        split="auto" if schedule == "auto" else "even",
    )
    trainer = quiet_trainer(
        devices=setting.num_ranks,
        strategy=strategy,
        max_epochs=1,
    )
    num_batches = NUM_TO_SETTLE + num_steps + 1
    size = setting.num_microbatches
    samples = alike_samples(size * num_batches, torch.zeros(ROWS, FEATURES))
    model = MixingModel(setting.block_seconds)
    with slow_copies(setting.speed):
        trainer.fit(model, DataLoader(samples, batch_size=size))
    return Run(strategy.times.take(num_steps).wall, strategy.report())


def measure(setting: Setting, num_steps: int, num_hands: int) -> tuple[Run, dict[str, Run]]:
    """Return the run of what was chosen, and those of the best choices by hand."""
    auto = train(setting, num_steps, "auto")
    hands: list[Any] = [None]
    if dist.get_rank() == 0:
        hands = [setting.best_by_hand(num_hands)]
    dist.broadcast_object_list(hands)
    return auto, {hand.label: train(setting, num_steps, hand.plan) for hand in hands[0]}


def row(setting: Setting, auto: Run, hands: dict[str, Run]) -> list[str]:
    """Return the cells of a line."""
    report = auto.report
    (taken,) = [c for c in report["candidates"] if c["fits"] and not c["reason"]]
    name = f"{taken['schedule']} x{taken['num_chunks']}"
    name += "".join(f"+{taken[how]}" for how in ("offload", "recompute") if taken[how] != "none")
    best = min(hands, key=lambda label: hands[label].seconds)
    return [
        *setting.name.split("/"),
        name,
        f"{taken['period'] * 1e3:.0f}",
        f"{report['period'] * 1e3:.0f}",
        f"{auto.seconds * 1e3:.0f}",
        *(f"{auto.seconds / promised:.3f}" for promised in (taken["period"], report["period"])),
        ", ".join(f"{label} {hand.seconds * 1e3:.0f}" for label, hand in hands.items()),
        f"{auto.seconds / hands[best].seconds:.3f}",
        *peaks(report, setting.memory_limit),
    ]


def peaks(report: dict[str, Any], limit: int | None) -> list[str]:
    """Return the cells of the ranks' peaks: in the ledgers, in the plan, and what they may be."""
    measured, planned = report["measured"]["peak_activation_bytes"], report["peak_memory"]
    same = "the same" if measured == planned else _kibibytes(planned)
    return [_kibibytes(measured), same, "" if limit is None else f"{limit / 1024:.0f}"]


def _kibibytes(sizes: Sequence[float]) -> str:
    return " ".join(f"{size / 1024:.0f}" for size in sizes)


HEADER = [
    *("blocks", "links", "limit", "auto", "promised, ms", "planned, ms", "measured, ms"),
    *("/ promised", "/ planned", "by hand, ms", "auto / best hand"),
    *("peaks, KiB", "the plan's", "limit, KiB"),
]


def settings(num_ranks: int, num_microbatches: int, milliseconds: float) -> list[Setting]:
    """Return all settings."""
    sizes = num_ranks, num_microbatches, milliseconds / 1e3
    return [Setting(*sizes, *each) for each in product((True, False), LINKS, SHARES)]


def read_arguments(line: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--p", type=int, default=4, help="ranks")
    parser.add_argument("--m", type=int, default=8, help="microbatches")
    parser.add_argument("--milliseconds", type=float, default=30, help="of a block's F, B and W")
    parser.add_argument("--steps", type=int, default=4, help="that are measured of each run")
    parser.add_argument("--hands", type=int, default=2, help="families that run by hand")
    parser.add_argument("--only", nargs="+", help="settings, as even/slow/tight")
    return parser.parse_args(line)


def main(line: Sequence[str]) -> None:
    """Measure, and print a table; Lightning starts this command again for the other ranks."""
    given = read_arguments(line)
    wanted = [
        setting
        for setting in settings(given.p, given.m, given.milliseconds)
        if given.only is None or setting.name in given.only
    ]
    sleep_on_time()
    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    for place, setting in enumerate(wanted):
        # Links are emulated, so one that has been measured says nothing about another.
        with TemporaryDirectory() as caches, redirect_stdout(StringIO()):  # tables of runs' stages
            os.environ["XDG_CACHE_HOME"] = caches
            found = measure(setting, given.steps, given.hands)
        if dist.get_rank() == 0:
            if not place:
                say(HEADER)
                say(["---"] * len(HEADER))
            say(row(setting, *found))


def say(cells: Sequence[str]) -> None:
    """Print a line of the table."""
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

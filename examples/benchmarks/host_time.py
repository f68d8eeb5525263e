"""What the host pays for each action of a step, on every rank: CPU time of the thread that runs it.

Blocks sleep and compute next to nothing, so what is left is Python and torch's own bookkeeping, in
the state in which a step finds them: after each sleep the machine's caches are cold. A real Trainer
runs the plan in one process per rank.

    python -m examples.benchmarks.host_time --p 8 --m 16 --schedule zb_h1
    python -m examples.benchmarks.host_time --p 2 --m 8 --profile F

Medians of an action over the steps, in microseconds; "beside actions" is what a step takes in
Lightning's loop and ours, of the same thread, and "other threads" what gloo's take in a step.
``--profile F`` prints where the last rank's F go, by the calls that cProfile counts (which
lengthens Python against torch, and is for finding out, not for figures).
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from examples.benchmarks.harness import (
    FEATURES,
    EmulatedModel,
    quiet_trainer,
    run_ranks,
    write_results,
)
from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.schedule import Action, Kind, build

NUM_WARM_UP_STEPS = 4
KINDS = (Kind.F, Kind.B, Kind.BW, Kind.W, Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B)
BESIDE, OTHERS = "beside actions", "other threads"


class Busy(NamedTuple):
    """CPU seconds so far."""

    thread: float
    process: float

    @classmethod
    def now(cls) -> Busy:
        """Read the clocks."""
        return cls(time.thread_time(), time.process_time())


class ActionCosts(Callback):
    """Measures the actions of this rank.

    Args:
        profiled: The kind of action to profile; "": none is.

    Attributes:
        seconds: Those of each action by its kind, and of a step beside its actions.
        profile: What was profiled.
    """

    def __init__(self, profiled: str) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.profile = cProfile.Profile()
        self._profiled = profiled
        self._in_actions = 0.0

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        """Measure around what the executor does for each kind."""
        # Private: nothing public runs an action; each of these does the actions of one kind.
        handlers = trainer.strategy.run.executor._handlers  # type: ignore[attr-defined]
        for kind, handler in handlers.items():
            handlers[kind] = self._measured(kind, handler)

    def _measured(self, kind: Kind, handler: Callable[[Action], None]) -> Callable[[Action], None]:
        def measured(action: Action) -> None:
            self._go_on_profiling(kind.name == self._profiled)
            began = time.thread_time()
            handler(action)
            seconds = time.thread_time() - began
            self._go_on_profiling(self._profiled == BESIDE)
            self.seconds[kind.name].append(seconds)
            self._in_actions += seconds

        return measured

    def _go_on_profiling(self, is_meant: bool) -> None:
        if is_meant:
            self.profile.enable()
        else:
            self.profile.disable()

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        """Begin a step; the first ones, which look at the model, count for nothing."""
        if index == NUM_WARM_UP_STEPS:
            self.seconds.clear()
            self.profile.clear()
        self._in_actions, self._began = 0.0, Busy.now()
        self._go_on_profiling(self._profiled == BESIDE)

    def on_train_batch_end(self, *_: Any) -> None:
        """Keep what the step took beside its actions."""
        self.profile.disable()
        spent = Busy(*(now - then for now, then in zip(Busy.now(), self._began, strict=True)))
        self.seconds[BESIDE].append(spent.thread - self._in_actions)
        self.seconds[OTHERS].append(spent.process - spent.thread)


def measure(given: argparse.Namespace) -> list[dict[str, float]]:
    """Train on this rank; return the medians of all ranks, in pipeline order."""
    costs = ActionCosts(given.profile)
    trainer = quiet_trainer(
        devices=given.p,
        strategy=PipeOffloadStrategy(
            schedule=given.schedule, num_microbatches=given.m, split="even"
        ),
        max_epochs=1,
        callbacks=[costs],
    )
    num_blocks = build(given.schedule, given.p, given.m).num_stages * given.blocks
    samples: Any = torch.zeros((given.steps + NUM_WARM_UP_STEPS) * given.m, FEATURES)
    model = EmulatedModel(num_blocks, given.milliseconds / 1e3)
    trainer.fit(model, DataLoader(samples, batch_size=given.m))
    rank = trainer.strategy.run.executor.rank  # type: ignore[attr-defined]
    if given.profile and rank == given.p - 1:
        costs.profile.dump_stats(given.profiled_to)
    found: list[Any] = [None] * given.p
    medians = {name: median(seconds) for name, seconds in costs.seconds.items()}
    dist.all_gather_object(found, (rank, medians))
    return [of_rank for _, of_rank in sorted(found, key=lambda entry: entry[0])]


def make_table(given: argparse.Namespace, ranks: Sequence[dict[str, float]]) -> Table:
    """Make the table: a row for each kind of action, a column for each rank."""
    table = Table(title=f"{given.schedule}, m = {given.m}: CPU time in us")
    table.add_column("")
    for rank in range(len(ranks)):
        table.add_column(f"rank {rank}", justify="right")
    for name in (*(kind.name for kind in KINDS), BESIDE, OTHERS):
        cells = [f"{of[name] * 1e6:.0f}" if name in of else "" for of in ranks]
        if any(cells):
            table.add_row(name, *cells)
    return table


def read_arguments(line: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--p", type=int, default=8, help="ranks")
    parser.add_argument("--m", type=int, default=16, help="microbatches")
    parser.add_argument("--schedule", default="zb_h1")
    parser.add_argument("--blocks", type=int, default=1, help="of each stage")
    parser.add_argument("--milliseconds", type=float, default=10, help="of a block's F, B and W")
    parser.add_argument("--steps", type=int, default=12, help="measured steps")
    parser.add_argument("--profile", default="", help="F, B, W, SEND_F ... or 'beside actions'")
    parser.add_argument("--results", help=argparse.SUPPRESS)
    parser.add_argument("--profiled-to", help=argparse.SUPPRESS)
    return parser.parse_args(line)


def print_profile(path: Path, names: Iterable[str] = ("tottime", "cumtime")) -> None:
    """Print the calls that take most, by themselves and with all that they call."""
    for name in names:
        pstats.Stats(str(path)).sort_stats(name).print_stats(40)


def main(line: Sequence[str]) -> None:
    """Measure, and print a table."""
    given = read_arguments(line)
    if given.results:
        write_results(lambda: measure(given), given.results)
        return
    with tempfile.TemporaryDirectory() as folder:
        profiled_to = Path(folder) / "profile"
        ranks = run_ranks("host_time", *line, "--profiled-to", str(profiled_to))
        Console(width=150).print(make_table(given, ranks))
        if given.profile:
            print_profile(profiled_to)


if __name__ == "__main__":
    main(sys.argv[1:])

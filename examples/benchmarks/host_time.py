"""What the host pays for each action of a step, on every rank: CPU time of the thread that runs it.

Blocks sleep and compute next to nothing, so what is left is Python and torch's own bookkeeping, in
the state in which a step finds them: after each sleep the machine's caches are cold. A real Trainer
runs the plan in one process per rank, then ``torch.distributed.pipelining`` the same schedule in
the same processes; a Trainer on one device trains one rank's blocks.

    python -m examples.benchmarks.host_time --p 8 --m 16 --schedule zb_h1
    python -m examples.benchmarks.host_time --p 2 --m 8 --profile F

Medians of an action over the steps, in microseconds, of each rank; torch's as a mean over its
ranks, and ours over torch's by that mean. "Receiving" is what of F or B is spent on its message and
on posting the next receive, which torch does outside of what is measured of it. "Between actions"
is what a step takes in Lightning's loop and ours, of the same thread; in torch's runtime, which
sends in no action of its own, its messages too, and in the plain Trainer all but the user's step
and backward. "Step" is all of a step in the thread, and "other threads" what gloo's take.
``--profile F`` prints where the last rank's F go, by the calls that cProfile counts (which makes
Python slower than torch, and is for finding out, not for figures).
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
from statistics import fmean, median
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
from examples.benchmarks.torch_pipeline import TorchPipeline, csv_peer
from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.schedule import Kind, build

NUM_WARM_UP_STEPS = 4
KINDS = (Kind.F, Kind.B, Kind.BW, Kind.W, Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B)
RECEIVING, BETWEEN, STEP, OTHERS = "receiving", "between actions", "step", "other threads"

Costs = dict[str, float]


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
        seconds: Those of each action by its kind, and of a step outside of its actions.
        profile: What was profiled.
    """

    def __init__(self, profiled: str) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.profile = cProfile.Profile(time.thread_time)
        self._profiled = profiled
        self._in_actions = self._received = 0.0

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        """Measure around what the executor does for each kind."""
        if isinstance(module, PlainModel):
            return
        # Private: nothing public runs an action; each of these does the actions of one kind.
        executor = trainer.strategy.split.executor  # type: ignore[attr-defined]
        for kind, handler in executor._handlers.items():
            executor._handlers[kind] = self.measured(kind.name, handler)
        executor.mailbox.receive = self._receiving(executor.mailbox.receive)

    def measured(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return an action that is measured."""

        def measured(*args: Any, **options: Any) -> Any:
            self._go_on_profiling(name == self._profiled)
            began = time.thread_time()
            result = run(*args, **options)
            seconds = time.thread_time() - began
            self._go_on_profiling(self._profiled == BETWEEN)
            self.seconds[name].append(seconds - self._received)
            self._in_actions += seconds
            self._received = 0.0
            return result

        return measured

    def _receiving(self, take: Callable[..., Any]) -> Callable[..., Any]:
        def receiving(*args: Any) -> Any:
            began = time.thread_time()
            tensors = take(*args)
            self._received = time.thread_time() - began
            if tensors:
                self.seconds[RECEIVING].append(self._received)
            return tensors

        return receiving

    def _go_on_profiling(self, is_meant: bool) -> None:
        if is_meant:
            self.profile.enable()
        else:
            self.profile.disable()

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, index: int) -> None:
        """Begin a step."""
        self.start_step(index)

    def on_train_batch_end(self, *_: Any) -> None:
        """End it."""
        self.end_step()

    def medians(self) -> Costs:
        """Return the median of each kind of action, and of a step outside of them."""
        return {name: median(seconds) for name, seconds in self.seconds.items()}

    def start_step(self, index: int) -> None:
        """Begin a step; the first ones, which look at the model, count for nothing."""
        if index == NUM_WARM_UP_STEPS:
            self.seconds.clear()
            self.profile.clear()
        self._in_actions, self._began = 0.0, Busy.now()
        self._go_on_profiling(self._profiled == BETWEEN)

    def end_step(self) -> None:
        """Keep what the step took outside of its actions."""
        self.profile.disable()
        spent = Busy(*(now - then for now, then in zip(Busy.now(), self._began, strict=True)))
        self.seconds[BETWEEN].append(spent.thread - self._in_actions)
        self.seconds[STEP].append(spent.thread)
        self.seconds[OTHERS].append(spent.process - spent.thread)


class PlainModel(EmulatedModel):
    """Such a model on one device, whose step and backward count as actions.

    Args:
        costs: Measures them.
        num_blocks: Its blocks.
        seconds: Of a block's F, B or W.
    """

    def __init__(self, costs: ActionCosts, num_blocks: int, seconds: float) -> None:
        super().__init__(num_blocks, seconds)
        self.training_step = costs.measured("F", super().training_step)  # type: ignore[method-assign]
        self.backward = costs.measured("BW", super().backward)  # type: ignore[method-assign]


def measure(given: argparse.Namespace) -> dict[str, list[Costs]]:
    """Train on this rank; return the medians of all ranks, of ours and of torch's."""
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
    rank = trainer.strategy.split.executor.rank  # type: ignore[attr-defined]
    if given.profile and rank == given.p - 1:
        costs.profile.dump_stats(given.profiled_to)
    return {
        "ours": _of_all(rank, costs.medians()),
        "torch's": _of_all(dist.get_rank(), measure_torch(given)),
    }


def _of_all(rank: int, mine: Costs) -> list[Costs]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (rank, mine))
    return [of_rank for _, of_rank in sorted(found, key=lambda entry: entry[0]) if of_rank]


def measure_torch(given: argparse.Namespace) -> Costs:
    """Run the schedule in torch's runtime; empty where it cannot."""
    peer = csv_peer(given.schedule, given.p, given.m)
    if peer is None:
        return {}
    costs = ActionCosts("")
    seconds = given.milliseconds / 1e3
    pipeline = TorchPipeline(peer, given.m, seconds, num_blocks=given.blocks)
    for stage in pipeline.stages:
        stage.forward_one_chunk = costs.measured("F", stage.forward_one_chunk)
        stage.backward_weight_one_chunk = costs.measured("W", stage.backward_weight_one_chunk)
        both, of_input = (costs.measured(name, stage.backward_one_chunk) for name in ("BW", "B"))

        def backward(
            *args: Any, both: Any = both, of_input: Any = of_input, **options: Any
        ) -> None:
            (both if options.get("full_backward", True) else of_input)(*args, **options)

        stage.backward_one_chunk = backward
    for index in range(given.steps + NUM_WARM_UP_STEPS):
        costs.start_step(index)
        pipeline.step()
        costs.end_step()
    return costs.medians()


def measure_plain(given: argparse.Namespace) -> Costs:
    """Train a rank's blocks on one device."""
    costs = ActionCosts("")
    num_stages = build(given.schedule, given.p, given.m).num_stages
    model = PlainModel(costs, num_stages // given.p * given.blocks, given.milliseconds / 1e3)
    samples: Any = torch.zeros(given.steps + NUM_WARM_UP_STEPS, FEATURES)
    trainer = quiet_trainer(devices=1, max_epochs=1, callbacks=[costs])
    trainer.fit(model, DataLoader(samples))
    return costs.medians()


def make_table(given: argparse.Namespace, found: dict[str, list[Costs]], plain: Costs) -> Table:
    """Make the table: a row for each kind of action, a column for each rank of ours."""
    table = Table(title=f"{given.schedule}, m = {given.m}: CPU time in us")
    ranks, torchs = found["ours"], found["torch's"]
    names = [f"rank {rank}" for rank in range(len(ranks))]
    for name in ("", *names, "torch's", "/ torch's", "plain"):
        table.add_column(name, justify="right" if name else "left")
    for name in (*(kind.name for kind in KINDS), RECEIVING, BETWEEN, STEP, OTHERS):
        ours, peers = ([of[name] for of in each if name in of] for each in (ranks, torchs))
        if not ours:
            continue
        cells = [_microseconds(of.get(name)) for of in ranks]
        ratio = f"{fmean(ours) / fmean(peers):.2f}" if peers else ""
        cells += [_microseconds(fmean(peers) if peers else None), ratio]
        table.add_row(name, *cells, _microseconds(plain.get(name)))
    return table


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e6:.0f}"


def read_arguments(line: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--p", type=int, default=8, help="ranks")
    parser.add_argument("--m", type=int, default=16, help="microbatches")
    parser.add_argument("--schedule", default="zb_h1")
    parser.add_argument("--blocks", type=int, default=1, help="of each stage")
    parser.add_argument("--milliseconds", type=float, default=10, help="of a block's F, B and W")
    parser.add_argument("--steps", type=int, default=12, help="measured steps")
    parser.add_argument("--profile", default="", help="F, B, W, SEND_F ... or 'between actions'")
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
        found = run_ranks("host_time", *line, "--profiled-to", str(profiled_to))
        Console(width=150).print(make_table(given, found, measure_plain(given)))
        if given.profile:
            print_profile(profiled_to)


if __name__ == "__main__":
    main(sys.argv[1:])

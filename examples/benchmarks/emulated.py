"""How close to its plan a pipeline runs, where computing takes a given time and no core.

The blocks of a rank sleep through F, B and W, equally long whatever the schedule. Compared are

* "ours": the strategy in a Trainer, the optimizer's step and Lightning's own work included,
* "bare": our executor without the Trainer and without clipping,
* torch: ``torch.distributed.pipelining`` in the same processes (torch_pipeline.py).

By default all ranks wait for each other before each step, which lasts from the first rank's start
to the last rank's end, and torch runs the same schedule: its own GPipe, 1F1B or interleaved 1F1B,
else our CSV in its runtime.

    python -m examples.benchmarks.emulated --p 4 --m 8 --schedules 1f1b zb_h1

With ``--period`` steps follow each other with gradients clipped, and the time from one step to the
next is measured. Clipping needs the norm of all stages, for which torch's user writes an
``all_reduce``. Of torch's six schedules, tried for a few steps first, the best takes part.

    python -m examples.benchmarks.emulated --period --optimizer-sync post_validation
    python -m examples.benchmarks.emulated --period --milliseconds 30 --runs 3 --steps 10 --alone

They take turns, a run of steps at a time; figures are medians over the runs. "Planned" is the
simulator's time of the plan in use from step to step, with a barrier between steps and without.
"Naive" is model parallelism where one rank computes at a time, as under ``device_map``: the sum of
all ranks' work. A frozen base with adapters has next to no W:

    python -m examples.benchmarks.emulated --p 4 --m 16 --milliseconds 30 --schedules auto 1f1b
        --weight-share 0.01 --alone
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from examples.benchmarks.harness import (
    FEATURES,
    EmulatedModel,
    Moment,
    StepTimes,
    quiet_trainer,
    run_ranks,
    write_results,
)
from examples.benchmarks.torch_pipeline import (
    LEARNING_RATE,
    PEERS,
    Peer,
    TorchPipeline,
    csv_peer,
)
from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.runtime.run import split_into_microbatches
from lightning_pipeoffload.runtime.step import set_indices_and_weights
from lightning_pipeoffload.runtime.users_code import StepCall
from lightning_pipeoffload.schedule import Costs, build
from lightning_pipeoffload.schedule.simulation import steady_period

NUM_TRIED_STEPS = 4


SAME = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved_1f1b": "Interleaved1F1B"}  # by our names


@dataclass(frozen=True)
class Setup:
    """One comparison.

    Attributes:
        schedule: A name of ours; "auto" too.
        num_ranks: Ranks.
        num_microbatches: Microbatches of a step.
        milliseconds: Of all of a rank's F or B of one microbatch.
        weight_share: Seconds of W, as a share of F's.
        has_barrier: Whether all ranks wait for each other before each step.
        clip: The norm that gradients are clipped to; None: they are not.
        optimizer_sync: The strategy's argument.
        peers: Torch's: "same" schedule, "best" of six, or "none".
        num_runs: Runs that count.
        num_steps: Steps that a run measures.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    milliseconds: float
    weight_share: float
    has_barrier: bool
    clip: float | None
    optimizer_sync: str
    peers: str
    num_runs: int
    num_steps: int

    @property
    def num_chunks(self) -> int:
        """Blocks of a rank; "auto" may make two stages of them, or one."""
        if self.schedule == "auto":
            return 2
        schedule = build(self.schedule, self.num_ranks, self.num_microbatches)
        return schedule.num_stages // self.num_ranks

    @property
    def seconds(self) -> float:
        """Of a block's F or B."""
        return self.milliseconds / 1e3 / self.num_chunks

    @property
    def naive(self) -> float:
        """Seconds of a step where one rank computes at a time."""
        of_rank = self.milliseconds / 1e3 * (2 + self.weight_share)
        return of_rank * self.num_ranks * self.num_microbatches

    def torch_peers(self) -> dict[str, Peer]:
        """Return the schedules of torch's that take part, by name."""
        if self.peers == "best":
            return PEERS
        if self.peers == "none" or self.schedule == "auto":
            return {}
        if self.schedule in SAME:
            name = SAME[self.schedule]
            return {name: PEERS[name]}
        peer = csv_peer(self.schedule, self.num_ranks, self.num_microbatches)
        return {} if peer is None else {"our CSV": peer}


class Contender(Protocol):
    """Something whose steps are timed."""

    def step(self) -> None:
        """Train on one batch."""


def time_run(contender: Contender, setup: Setup, num_steps: int) -> Moment:
    """Time so many steps; all ranks call it."""
    times = StepTimes(setup.has_barrier)
    dist.barrier()
    for _ in range(num_steps + 2):
        times.note()
        contender.step()
    return times.take(num_steps)


class BareLoop:
    """This rank's own executor, without the Trainer and without clipping."""

    def __init__(self, trainer: Trainer, setup: Setup) -> None:
        run = trainer.strategy.split  # type: ignore[attr-defined]
        self._pipeline, self._executor, self._plan = run.pipeline, run.executor, run.plan
        self._module = trainer.lightning_module
        own = self._pipeline.tensors.local_tensors().values()
        self._optimizer = torch.optim.SGD(own, lr=LEARNING_RATE)
        self._num_microbatches = setup.num_microbatches
        self._batch = torch.zeros(setup.num_microbatches, FEATURES)

    def step(self) -> None:
        """Train on one batch."""
        self._optimizer.zero_grad()
        slices = split_into_microbatches(
            self._pipeline, self._batch, 1, self._call, "training_step", seed=0
        )
        weights = [1 / self._num_microbatches] * self._num_microbatches
        self._executor.run(self._plan, set_indices_and_weights(slices, weights))
        self._optimizer.step()

    def _call(self, part: Tensor, call: StepCall) -> Any:
        return self._module.training_step(part, 0)


class TimedStrategy(PipeOffloadStrategy):
    """Notes on each rank when the step of a batch begins.

    A hook would not do: steps wait where hooks might read what they have not finished.

    Args:
        has_barrier: As of ``StepTimes``.
        options: As of the strategy.

    Attributes:
        times: When steps began.
        before_epoch: Called before the first step of an epoch.
    """

    def __init__(self, has_barrier: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.times = StepTimes(has_barrier)
        self.before_epoch: Callable[[], None] = lambda: None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Run the batch."""
        if not batch_idx:
            self.before_epoch()
        self.times.note()
        return super().training_step(batch, batch_idx)


def alike_samples(count: int, sample: Tensor) -> Any:
    """Return a dataset with so many times the same sample."""
    return sample.expand(count, *sample.shape)


class TakingTurns(Callback):
    """Runs the others before each epoch but the first, in which ours probes the model.

    Attributes:
        runs: What a step of each contender took, in each of its runs.
        tried: What it took of torch's schedules that were tried.
    """

    def __init__(self, setup: Setup, strategy: TimedStrategy) -> None:
        self._setup, self._strategy = setup, strategy
        self.runs: dict[str, list[Moment]] = {}
        self.tried: dict[str, Moment] = {}
        self._others: dict[str, Contender] = {}

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Keep what a step of ours took."""
        own = self._strategy.times.take(self._setup.num_steps)
        if trainer.current_epoch:
            self.runs.setdefault("ours", []).append(own)
        self._strategy.before_epoch = partial(self._run_others, trainer)

    def _run_others(self, trainer: Trainer) -> None:
        # Private: outside of the Trainer's steps calls of modules are watched, which takes time.
        with trainer.strategy.fit._hook_forwards.paused():  # type: ignore[attr-defined]
            if not self._others:
                self._choose_others(trainer)
            for name, other in self._others.items():
                took = time_run(other, self._setup, self._setup.num_steps)
                self.runs.setdefault(name, []).append(took)
            dist.barrier()

    def _choose_others(self, trainer: Trainer) -> None:
        for name, peer in self._setup.torch_peers().items():
            setup = self._setup
            seconds = setup.milliseconds / 1e3 / peer.num_chunks
            pipeline = TorchPipeline(
                peer, setup.num_microbatches, seconds, setup.weight_share, setup.clip
            )
            self.tried[name] = time_run(pipeline, self._setup, NUM_TRIED_STEPS)
            if self.tried[name] == min(self.tried.values()):
                self._others = {name: pipeline}
        self._others["bare"] = BareLoop(trainer, self._setup)


def measure(setup: Setup) -> dict[str, Any]:
    """Train on this rank; return what a step took, of all ranks, on each."""
    size, num_batches = setup.num_microbatches, setup.num_steps + 2
    strategy = TimedStrategy(
        setup.has_barrier,
        schedule=setup.schedule,
        num_microbatches=setup.num_microbatches,
        split="even",
        optimizer_sync=setup.optimizer_sync,
    )
    turns = TakingTurns(setup, strategy)
    trainer = quiet_trainer(
        devices=setup.num_ranks,
        strategy=strategy,
        gradient_clip_val=setup.clip,
        max_epochs=setup.num_runs + 1,
        callbacks=[turns],
    )
    num_blocks = setup.num_chunks * setup.num_ranks
    model = EmulatedModel(num_blocks, setup.seconds, setup.weight_share)
    samples = alike_samples(size * num_batches, torch.zeros(FEATURES))
    trainer.fit(model, DataLoader(samples, batch_size=size))
    return {
        "schedule": strategy.report()["schedule"],
        "planned": planned_periods(setup, strategy),
        "runs": turns.runs,
        "tried": turns.tried,
    }


def planned_periods(setup: Setup, strategy: PipeOffloadStrategy) -> tuple[float, float]:
    """Return the periods of the plan in use, with a barrier and without."""
    plan = strategy.plan
    seconds = setup.milliseconds / 1e3 * setup.num_ranks / plan.num_stages
    costs = Costs(seconds, seconds, seconds * setup.weight_share)
    return steady_period(plan, costs, True), steady_period(plan, costs, False)


def add_rows(table: Table, setup: Setup, found: dict[str, Any]) -> None:
    """Add what was measured: ours, the bare loop, torch's, and what was tried of torch's."""
    medians = {
        name: Moment(*(median(run[index] for run in runs) for index in range(2)))
        for name, runs in found["runs"].items()
    }
    (peer,) = [name for name in medians if name not in ("ours", "bare")] or [""]
    labels = {
        "ours": f"ours: {found['schedule']}, {setup.optimizer_sync}",
        "bare": "bare: its executor, unclipped",
        peer: f"torch's {'best' if setup.peers == 'best' else 'same'}: {peer}",
    }
    for name, label in labels.items():
        if name:
            took = medians[name]
            over = [f"{took.wall / period:.3f}" for period in found["planned"]]
            of_peer = f"{took.wall / medians[peer].wall:.3f}" if peer else ""
            of_plan = over if name != peer else ["", ""]
            busy = f"{took.busy * 1e3:.0f}"
            over_naive = f"{setup.naive / took.wall:.2f}"
            table.add_row(label, f"{took.wall * 1e3:.0f}", *of_plan, of_peer, over_naive, busy)
    if setup.peers == "best":
        for name, (wall, busy) in found["tried"].items():
            figures = f"{wall * 1e3:.0f}", "", "", "", "", f"{busy * 1e3:.0f}"
            table.add_row(f"tried: {name}", *figures)
    table.add_section()


def make_table(title: str) -> Table:
    """Make the table's head."""
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for name in ("ms", "/ planned, barrier", "/ planned, none", "/ torch's", "naive /", "busy, ms"):
        table.add_column(name, justify="right")
    return table


def read_arguments(line: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--p", type=int, nargs="+", default=[8], help="ranks")
    parser.add_argument("--m", type=int, help="microbatches; default: 2p")
    parser.add_argument("--milliseconds", type=float, default=10, help="of a rank's F or B")
    parser.add_argument("--weight-share", type=float, default=1.0, help="of W, of F's time")
    parser.add_argument("--schedules", nargs="+", default=["zb_h2"], help="ours, one by one")
    parser.add_argument("--period", action="store_true", help="clipped steps, without a barrier")
    parser.add_argument("--optimizer-sync", default="barrier")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="of a run")
    parser.add_argument("--alone", action="store_true", help="without torch's schedules")
    parser.add_argument("--setup", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    return parser.parse_args(line)


def main(line: Sequence[str] | None = None) -> None:
    """Measure, and print one table for each number of ranks."""
    given = read_arguments(line)
    if given.results:
        write_results(lambda: measure(Setup(**json.loads(given.setup))), given.results)
        return
    peers = "none" if given.alone else "best" if given.period else "same"
    for p in given.p:
        what = "Periods with clipping" if given.period else "Steps after a barrier"
        m = given.m or 2 * p
        table = make_table(f"{what}, p = {p}, m = {m}, {given.milliseconds:g} ms a rank")
        for schedule in given.schedules:
            setup = Setup(
                schedule=schedule,
                num_ranks=p,
                num_microbatches=m,
                milliseconds=given.milliseconds,
                weight_share=given.weight_share,
                has_barrier=not given.period,
                clip=1.0 if given.period else None,  # norms are 0.1
                optimizer_sync=given.optimizer_sync,
                peers=peers,
                num_runs=given.runs,
                num_steps=given.steps,
            )
            add_rows(table, setup, run_ranks("emulated", "--setup", json.dumps(asdict(setup))))
        Console(width=110).print(table)


if __name__ == "__main__":
    main()

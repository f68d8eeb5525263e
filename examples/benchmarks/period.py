"""The time from one step to the next, with gradients clipped: ours in a Trainer, beside torch's.

Clipping needs the norm of all stages, so a rank that waits for it begins its next step when all
have ended this one. The blocks of a rank sleep as long whatever the schedule: with v chunks those
of each chunk the v-th part. Ours is the strategy in a Trainer with ``gradient_clip_val``; torch's
is each schedule of ``torch.distributed.pipelining`` in the same processes, with clipping as its
user writes it; "bare" is our executor without Trainer and without clipping.

    python -m examples.benchmarks.emulated --period
    python -m examples.benchmarks.emulated --period --p 4 --m 8 --runs 3 --schedules zb_h2 zb_v
    python -m examples.benchmarks.emulated --period --milliseconds 30 --runs 3 --steps 10 --alone

They take turns, a run of steps at a time; a period is that of a run's steady steps, and figures are
medians over the runs. Of torch's schedules, tried for a few steps first, the best takes part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader, Dataset

from examples.benchmarks.emulated import (
    FEATURES,
    EmulatedBlock,
    EmulatedModel,
    Moment,
    WeightGradStore,
    sleep_on_time,
)
from examples.benchmarks.quiet_trainer import quiet_trainer
from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.runtime.step.batch_slice import make_microbatches
from lightning_pipeoffload.runtime.users_code.step_call import StepCall
from lightning_pipeoffload.schedule import Costs, build
from lightning_pipeoffload.schedule.simulation.simulate import steady_period

NUM_TRIED_STEPS = 4
LEARNING_RATE = 0.1


class Peer(NamedTuple):
    """A schedule of torch's: its class, stages of a rank, and whether these are in a V."""

    schedule: Any
    num_chunks: int
    is_v: bool = False


PEERS = {
    "GPipe": Peer(ScheduleGPipe, 1),
    "1F1B": Peer(Schedule1F1B, 1),
    "Interleaved1F1B": Peer(ScheduleInterleaved1F1B, 2),
    "InterleavedZeroBubble": Peer(ScheduleInterleavedZeroBubble, 2),
    "ZBVZeroBubble": Peer(ScheduleZBVZeroBubble, 2, is_v=True),
    "DualPipeV": Peer(ScheduleDualPipeV, 2, is_v=True),
}


@dataclass(frozen=True)
class Setup:
    """One comparison.

    Attributes:
        schedule: A name of ours; "auto" too.
        num_ranks: Ranks.
        num_microbatches: Microbatches of a step.
        milliseconds: Of all of a rank's F, B or W of one microbatch.
        optimizer_sync: The strategy's argument.
        clip: The norm that gradients are clipped to.
        num_runs: Runs that count.
        num_steps: Periods that a run measures.
        alone: Whether torch's schedules are left out.
    """

    schedule: str
    num_ranks: int
    num_microbatches: int
    milliseconds: float
    optimizer_sync: str
    clip: float
    num_runs: int
    num_steps: int
    alone: bool

    @property
    def num_chunks(self) -> int:
        """Blocks of a rank; "auto" may make two stages of them, or one."""
        if self.schedule == "auto":
            return 2
        schedule = build(self.schedule, self.num_ranks, self.num_microbatches)
        return schedule.num_stages // self.num_ranks

    @property
    def seconds(self) -> float:
        """Of a block's F, B and W."""
        return self.milliseconds / 1e3 / self.num_chunks


class Period(NamedTuple):
    """Seconds from one step to the next, and those in which the threads of a rank had a core."""

    wall: float
    busy: float


class StepStarts:
    """The moments at which one run's steps began; the first step settles, and counts for nothing.

    Attributes:
        moments: What was noted.
    """

    def __init__(self) -> None:
        self.moments: list[Moment] = []

    def note(self) -> None:
        """Note that a step begins."""
        self.moments.append(Moment.now())

    def take_period(self, num_steps: int) -> Period:
        """Return the mean of the last steps that have both ends, of the slowest rank; all call it.

        Args:
            num_steps: How many there are.
        """
        first, last = self.moments[-1 - num_steps], self.moments[-1]
        self.moments = []
        own = [(end - start) / num_steps for start, end in zip(first, last, strict=True)]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        return Period(*map(max, zip(*of_ranks, strict=True)))


class Contender(Protocol):
    """Something whose steps are timed."""

    def step(self) -> None:
        """Train on one batch."""


def time_run(contender: Contender, num_steps: int) -> Period:
    """Run as many steps as it takes to have so many periods; all ranks call it."""
    starts = StepStarts()
    dist.barrier()
    for _ in range(num_steps + 2):
        starts.note()
        contender.step()
    return starts.take_period(num_steps)


class TorchPipeline:
    """One rank of the same pipeline in ``torch.distributed.pipelining``.

    Args:
        peer: The schedule of torch's.
        setup: The comparison.
    """

    def __init__(self, peer: Peer, setup: Setup) -> None:
        rank, p = dist.get_rank(), setup.num_ranks
        places = [rank, 2 * p - 1 - rank if peer.is_v else p + rank][: peer.num_chunks]
        seconds = setup.milliseconds / 1e3 / peer.num_chunks
        stages = [_torch_stage(place, p * peer.num_chunks, seconds) for place in places]
        given: Any = stages if peer.num_chunks > 1 else stages[0]
        self._schedule = peer.schedule(given, setup.num_microbatches, loss_fn=_mean)
        self._parameters = [p for stage in stages for p in stage.submod.parameters()]
        self._optimizer = torch.optim.SGD(self._parameters, lr=LEARNING_RATE)
        self._clip = setup.clip
        self._batch = torch.zeros(setup.num_microbatches, FEATURES)
        self._has_first = any(stage.is_first for stage in stages)
        self._has_last = any(stage.is_last for stage in stages)

    def step(self) -> None:
        """Train on one batch."""
        self._optimizer.zero_grad()
        arguments = (self._batch,) if self._has_first else ()
        self._schedule.step(*arguments, target=self._batch if self._has_last else None)
        norm = get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        squared = norm**2
        dist.all_reduce(squared)
        clip_grads_with_norm_(self._parameters, self._clip, squared.sqrt())
        self._optimizer.step()


def _torch_stage(index: int, num_stages: int, seconds: float) -> PipelineStage:
    store = WeightGradStore()  # torch's W without its walk through the graph, as an expert has it
    sample = torch.zeros(1, FEATURES, requires_grad=True)
    return PipelineStage(
        EmulatedBlock(seconds, store.put),
        index,
        num_stages,
        torch.device("cpu"),
        # Given, not inferred: inference would run a backward whose weight gradients stay left.
        input_args=sample,
        output_args=sample,
        dw_builder=store.take,
    )


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


class BareLoop:
    """This rank's own executor, without the Trainer and without clipping.

    Args:
        trainer: Whose strategy has it.
        setup: The comparison.
    """

    def __init__(self, trainer: Trainer, setup: Setup) -> None:
        run = trainer.strategy.run  # type: ignore[attr-defined]
        self._pipeline, self._executor, self._plan = run.pipeline, run.executor, run.plan
        self._module = trainer.lightning_module
        own = self._pipeline.ownership.local_tensors().values()
        self._optimizer = torch.optim.SGD(own, lr=LEARNING_RATE)
        self._num_microbatches = setup.num_microbatches
        self._batch = torch.zeros(setup.num_microbatches, FEATURES)

    def step(self) -> None:
        """Train on one batch."""
        self._optimizer.zero_grad()
        slices = self._pipeline.cut_batch(self._batch, 1, self._call, "training_step", seed=0)
        weights = [1 / self._num_microbatches] * self._num_microbatches
        self._executor.run(self._plan, make_microbatches(slices, weights))
        self._optimizer.step()

    def _call(self, part: Tensor, call: StepCall) -> Any:
        return self._module.training_step(part, 0)


class NotedSamples(Dataset[Tensor]):
    """The samples of an epoch, which is a run of ours; the others run before it starts.

    Reading a batch notes that a step begins, not a hook: a step waits for what hooks might look at.

    Args:
        setup: The comparison.

    Attributes:
        starts: When steps of ours began.
        before_epoch: Called before the first sample is read.
    """

    def __init__(self, setup: Setup) -> None:
        self._size = setup.num_microbatches
        self._num_samples = (setup.num_steps + 2) * setup.num_microbatches
        self.starts = StepStarts()
        self.before_epoch: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        if index == 0:
            self.before_epoch()
        if index % self._size == 0:
            self.starts.note()
        return torch.zeros(FEATURES)


class TakingTurns(Callback):
    """Lets the others run before each epoch but the first, in which ours looks at the model.

    Args:
        setup: The comparison.
        samples: What ours trains on.

    Attributes:
        periods: Those of each contender's runs.
        tried: Those of torch's schedules that were tried.
    """

    def __init__(self, setup: Setup, samples: NotedSamples) -> None:
        self._setup, self._samples = setup, samples
        self.periods: dict[str, list[Period]] = {}
        self.tried: dict[str, Period] = {}
        self._others: dict[str, Contender] = {}

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Keep the period of ours."""
        own = self._samples.starts.take_period(self._setup.num_steps)
        if trainer.current_epoch:
            self.periods.setdefault("ours", []).append(own)
        self._samples.before_epoch = partial(self._run_others, trainer)

    def _run_others(self, trainer: Trainer) -> None:
        # Private: outside of the Trainer's steps calls of modules are looked at, which takes time.
        with trainer.strategy._hook_forwards.paused():  # type: ignore[attr-defined]
            if not self._others:
                self._choose_others(trainer)
            for name, other in self._others.items():
                self.periods.setdefault(name, []).append(time_run(other, self._setup.num_steps))
            dist.barrier()

    def _choose_others(self, trainer: Trainer) -> None:
        peers = {} if self._setup.alone else PEERS
        for name, peer in peers.items():
            pipeline = TorchPipeline(peer, self._setup)
            self.tried[name] = time_run(pipeline, NUM_TRIED_STEPS)
            if self.tried[name] == min(self.tried.values()):
                self._others = {name: pipeline}
        self._others["bare"] = BareLoop(trainer, self._setup)


def measure(setup: Setup) -> dict[str, Any]:
    """Train on this rank; return what global rank 0 knows of all."""
    samples = NotedSamples(setup)
    turns = TakingTurns(setup, samples)
    strategy = PipeOffloadStrategy(
        schedule=setup.schedule,
        num_microbatches=setup.num_microbatches,
        split="even",
        optimizer_sync=setup.optimizer_sync,
    )
    trainer = quiet_trainer(
        devices=setup.num_ranks,
        strategy=strategy,
        gradient_clip_val=setup.clip,
        max_epochs=setup.num_runs + 1,
        callbacks=[turns],
    )
    model = EmulatedModel(setup.num_chunks * setup.num_ranks, setup.seconds)
    trainer.fit(model, DataLoader(samples, batch_size=setup.num_microbatches))
    found = strategy.report()
    return {
        "schedule": found["schedule"],
        "planned": planned_periods(setup, strategy),
        "periods": turns.periods,
        "tried": turns.tried,
    }


def planned_periods(setup: Setup, strategy: PipeOffloadStrategy) -> tuple[float, float]:
    """Return the periods of the plan in use, with a barrier and without."""
    plan = strategy.plan
    seconds = setup.milliseconds / 1e3 * setup.num_ranks / plan.num_stages
    costs = Costs(seconds, seconds, seconds)
    return steady_period(plan, costs, True), steady_period(plan, costs, False)


def run_ranks(setup: Setup) -> dict[str, Any]:
    """Measure in processes of their own; Lightning starts this command again for the others."""
    command = [sys.executable, "-m", "examples.benchmarks.period"]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        subprocess.run(
            [*command, json.dumps(asdict(setup)), str(results)],
            check=True,
            stdout=subprocess.DEVNULL,  # tables of the run's stages
        )
        found: dict[str, Any] = json.loads(results.read_text())
    return found


def add_rows(table: Table, setup: Setup, found: dict[str, Any]) -> None:
    """Add what was measured: ours, the bare loop, torch's best, and what was tried of torch's."""
    with_barrier, without = found["planned"]
    medians = {
        name: Period(*(median(run[place] for run in runs) for place in range(2)))
        for name, runs in found["periods"].items()
    }
    (best,) = [name for name in medians if name not in ("ours", "bare")] or [""]
    add = partial(_add_row, table, (with_barrier, without), medians.get(best))
    add(f"ours: {found['schedule']}, {setup.optimizer_sync}", medians["ours"])
    add("bare: its executor, unclipped", medians["bare"])
    if best:
        add(f"torch's best: {best}", medians[best])
    for name, took in found["tried"].items():
        table.add_row(f"tried: {name}", f"{took[0] * 1e3:.0f}", "", "", "", f"{took[1] * 1e3:.0f}")
    table.add_section()


def _add_row(
    table: Table,
    planned: Sequence[float],
    best: Period | None,
    label: str,
    took: Period,
) -> None:
    is_ours = not label.startswith("torch")
    over = [f"{took.wall / period:.3f}" if is_ours else "" for period in planned]
    of_best = f"{took.wall / best.wall:.3f}" if best else ""
    table.add_row(label, f"{took.wall * 1e3:.0f}", *over, of_best, f"{took.busy * 1e3:.0f}")


def make_table(p: int, m: int, milliseconds: float) -> Table:
    """Make the table's head."""
    table = Table(title=f"Periods with clipping, p = {p}, m = {m}, {milliseconds:g} ms a rank")
    table.add_column("", no_wrap=True)
    for name in ("ms", "/ planned, barrier", "/ planned, none", "/ torch's best", "busy, ms"):
        table.add_column(name, justify="right")
    return table


def rank_main(setup: str, results: str) -> None:
    """Measure on one rank."""
    sleep_on_time()
    warnings.filterwarnings("ignore")
    found = measure(Setup(**json.loads(setup)))
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(found))


def read_arguments(line: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--p", type=int, default=8, help="ranks")
    parser.add_argument("--m", type=int, default=16, help="microbatches")
    parser.add_argument("--milliseconds", type=float, default=10, help="of a rank's F, B and W")
    parser.add_argument("--schedules", nargs="+", default=["zb_h2"], help="ours, one by one")
    parser.add_argument("--optimizer-sync", default="barrier")
    parser.add_argument("--clip", type=float, default=1.0, help="gradient_clip_val; norms are 0.1")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of a run")
    parser.add_argument("--alone", action="store_true", help="without torch's schedules")
    return parser.parse_args(line)


def main(line: Sequence[str]) -> None:
    """Measure, and print one table."""
    given = read_arguments(line)
    table = make_table(given.p, given.m, given.milliseconds)
    for schedule in given.schedules:
        setup = Setup(
            schedule=schedule,
            num_ranks=given.p,
            num_microbatches=given.m,
            milliseconds=given.milliseconds,
            optimizer_sync=given.optimizer_sync,
            clip=given.clip,
            num_runs=given.runs,
            num_steps=given.steps,
            alone=given.alone,
        )
        add_rows(table, setup, run_ranks(setup))
    Console(width=110).print(table)


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):
        rank_main(*sys.argv[1:])
    else:
        main(sys.argv[1:])

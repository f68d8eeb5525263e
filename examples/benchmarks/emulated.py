"""How close to its plan a pipeline runs, where computing takes a given time and no core.

Blocks sleep through their F, B and W, so that many ranks run on a few cores and all that is left is
the runtime: choosing the next action, starting it, sending, waiting. Ours is the real strategy in a
real Trainer; beside it, in the same processes, ``torch.distributed.pipelining`` runs the same
schedule: its own GPipe, 1F1B and interleaved 1F1B, else our CSV in its runtime. There the weight
gradients are left as torch does for any module, by walking the autograd graph, or as an expert may
have it with ``--dw-builder``.

    python -m examples.benchmarks.emulated --p 4 --m 8 --milliseconds 10 --schedules 1f1b zb_h1

A bare loop that only sleeps, sends and receives in the order of our plan shows what is left to
gain. The three take turns, step by step. Before each step there is a barrier, and the step lasts
from the first rank's start to the last rank's end; the optimizer's step is in it, and for ours
Lightning's own work. Theory is the makespan of what each executes: ours is lowered, and so sends
the input gradient of a fused backward before it computes the weight gradient. What counts is the
overhead ratio, since sleeping itself is not exact: (ours / theory - 1) / (torch / theory - 1). The
last columns say how long a step keeps a core busy, as a mean over the ranks: other load changes
that least.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import (
    _PipelineScheduleRuntime,  # private: the one that reads schedules from a file
)
from torch.utils.data import DataLoader

from examples.benchmarks.quiet_trainer import quiet_trainer
from examples.benchmarks.sleeping import Sleep
from lightning_pipeoffload import PipeOffloadStrategy, defer_weight_grad
from lightning_pipeoffload.runtime.mesh import RankMesh
from lightning_pipeoffload.runtime.payload import TensorSpec
from lightning_pipeoffload.runtime.transport import ProcessGroupTransport
from lightning_pipeoffload.schedule import COMPUTE, Costs, Schedule, build, lower, simulate
from lightning_pipeoffload.schedule.messages import RECVS, recv_of, send_of

FEATURES = 1024  # a message of 4 KiB
NUM_WARM_UP_STEPS = 2
PR_SET_TIMERSLACK = 29  # of linux/prctl.h
SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2"]
OF_ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}  # torch's own, by our names

Deferral = Callable[[Tensor, Callable[[], Tensor]], None]


@dataclass(frozen=True)
class Setup:
    """One line of the table."""

    schedule: str
    num_ranks: int
    num_microbatches: int
    milliseconds: float
    uses_dw_builder: bool = False

    @property
    def seconds(self) -> float:
        """Of each F, B and W."""
        return self.milliseconds / 1e3

    def build(self) -> Schedule:
        """Build the schedule."""
        return build(self.schedule, self.num_ranks, self.num_microbatches)


class _SleepForWeight(torch.autograd.Function):
    """The identity; its gradient takes a while, now or when ``defer`` asks for it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float, defer: Deferral | None) -> Tensor:
        ctx.weight, ctx.seconds, ctx.defer = weight, seconds, defer
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        def compute() -> Tensor:
            time.sleep(ctx.seconds)
            return gradient.clone()

        if ctx.defer is None:
            return compute(), None, None
        ctx.defer(ctx.weight, compute)
        return None, None, None


class EmulatedBlock(nn.Module):
    """A block whose F, B and W take as long.

    Args:
        seconds: of each.
        defer: takes the computation of a weight gradient; None: autograd computes it.
    """

    def __init__(self, seconds: float, defer: Deferral | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(FEATURES))
        self.seconds = seconds
        self.defer = defer

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` plus the weight."""
        weight = _SleepForWeight.apply(self.weight, self.seconds, self.defer)
        return Sleep.apply(x, self.seconds) + weight


class EmulatedModel(LightningModule):
    """A chain of blocks, as a user of Lightning would write it."""

    def __init__(self, num_blocks: int, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            EmulatedBlock(seconds, defer_weight_grad) for _ in range(num_blocks)
        )

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        """Return the mean of the last block's output."""
        for block in self.blocks:
            x = block(x)
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WeightGradStore:
    """What torch's ``dw_builder`` asks for: the weight gradients that a backward has left."""

    def __init__(self) -> None:
        self._left: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def put(self, weight: Tensor, compute: Callable[[], Tensor]) -> None:
        """Leave one."""
        self._left.append((weight, compute))

    def take(self) -> Callable[[], None]:
        """Return a function that computes all that were left since the last call."""
        left, self._left = self._left, []

        def run() -> None:
            for weight, compute in left:
                weight.grad = compute() if weight.grad is None else weight.grad + compute()

        return run


class TorchPipeline:
    """One rank of the same pipeline in ``torch.distributed.pipelining``."""

    def __init__(self, setup: Setup) -> None:
        schedule, rank = setup.build(), dist.get_rank()
        if schedule.rank_of(0) != 0:
            raise ValueError(f"{setup.schedule} places stages as torch does not")
        owned = [s for s in range(schedule.num_stages) if schedule.rank_of(s) == rank]
        stages = [_torch_stage(setup, stage, schedule.num_stages) for stage in owned]
        self._schedule = _torch_schedule(setup, stages)
        parameters = [p for stage in stages for p in stage.submod.parameters()]
        self._optimizer = torch.optim.SGD(parameters, lr=0.1)
        self._batch = torch.zeros(setup.num_microbatches, FEATURES)
        self._has_first = any(stage.is_first for stage in stages)
        self._has_last = any(stage.is_last for stage in stages)

    def step(self) -> None:
        """Train on one batch."""
        self._optimizer.zero_grad()
        arguments = (self._batch,) if self._has_first else ()
        target = self._batch if self._has_last else None
        self._schedule.step(*arguments, target=target)
        self._optimizer.step()


def _torch_stage(setup: Setup, index: int, num_stages: int) -> PipelineStage:
    store = WeightGradStore() if setup.uses_dw_builder else None
    sample = torch.zeros(1, FEATURES, requires_grad=True)
    return PipelineStage(
        EmulatedBlock(setup.seconds, store.put if store else None),
        index,
        num_stages,
        torch.device("cpu"),
        # Given, not inferred: inference would run a backward whose weight gradients stay left.
        input_args=sample,
        output_args=sample,
        dw_builder=store.take if store else None,
    )


def _torch_schedule(setup: Setup, stages: list[PipelineStage]) -> Any:
    if setup.schedule in OF_ONE_STAGE:
        return OF_ONE_STAGE[setup.schedule](stages[0], setup.num_microbatches, loss_fn=_mean)
    if setup.schedule == "interleaved_1f1b":
        return ScheduleInterleaved1F1B(stages, setup.num_microbatches, loss_fn=_mean)
    schedule = _PipelineScheduleRuntime(stages, setup.num_microbatches, loss_fn=_mean)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        setup.build().to_csv(path)
        schedule._load_csv(str(path))
    return schedule


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


class BareLoop:
    """One rank that sleeps, sends and receives as our plan says, and nothing else: the floor."""

    def __init__(self, setup: Setup) -> None:
        self._plan, self._seconds = lower(setup.build()), setup.seconds
        mesh = RankMesh(self._plan, dist.get_rank())
        self._actions = self._plan[mesh.rank]
        ranks = range(setup.num_ranks)
        edges = {(a, b) for a in ranks for b in ranks if a != b}
        cpu = torch.device("cpu")
        self._transport = ProcessGroupTransport(mesh, edges, cpu)

    def step(self) -> None:
        """Run the plan once."""
        message = [TensorSpec(torch.Size((1, FEATURES)), torch.float32, False)]
        for action in self._actions:
            if action.kind in RECVS:
                sender = self._plan.rank_of(send_of(action).stage)
                self._transport.post(action, sender, message)
        for action in self._actions:
            if action.kind in COMPUTE:
                time.sleep(self._seconds)
            elif action.kind in RECVS:
                self._transport.wait(action)
            else:
                peer = self._plan.rank_of(recv_of(action).stage)
                self._transport.send(action, peer, [torch.zeros(1, FEATURES)])
        self._transport.finish_step()


class Moment(NamedTuple):
    """Seconds on this rank's clocks; ``busy`` counts those in which its threads had a core."""

    wall: float
    busy: float

    @classmethod
    def now(cls) -> Moment:
        """Read the clocks."""
        return cls(time.perf_counter(), time.process_time())


class TakingTurns(Callback):
    """Times each step of the Trainer, and after it a step of torch's pipeline and of the bare loop.

    Attributes:
        spans: for each of the three, when this rank's steps began and ended.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.spans: dict[str, list[tuple[Moment, Moment]]] = {"ours": [], "torch": [], "bare": []}

    def on_train_start(self, *_: Any) -> None:
        """Build the others, when the ranks know each other."""
        self._others = {"torch": TorchPipeline(self._setup), "bare": BareLoop(self._setup)}

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin the Trainer's step."""
        dist.barrier()
        self._began = Moment.now()

    def on_train_batch_end(self, *_: Any) -> None:
        """End it, and run the others'."""
        self.spans["ours"].append((self._began, Moment.now()))
        for name, other in self._others.items():
            dist.barrier()
            began = Moment.now()
            other.step()
            self.spans[name].append((began, Moment.now()))


class PlainSteps(Callback):
    """Times each step of a Trainer on one device.

    Attributes:
        spans: When steps began and ended.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[Moment, Moment]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin a step."""
        self._began = Moment.now()

    def on_train_batch_end(self, *_: Any) -> None:
        """End it."""
        self.spans.append((self._began, Moment.now()))


def measure(setup: Setup, num_steps: int) -> dict[str, Moment]:
    """Train on this rank; return what a step of each takes, over all ranks."""
    strategy = PipeOffloadStrategy(
        schedule=setup.schedule, num_microbatches=setup.num_microbatches, split="even"
    )
    turns, plain = TakingTurns(setup), PlainSteps()
    num_stages = setup.build().num_stages
    fit(setup, num_steps, num_stages, turns, devices=setup.num_ranks, strategy=strategy)
    fit(setup, num_steps, 1, plain, devices=1)  # as much of Lightning, and one block
    spans = {**turns.spans, "plain": plain.spans}
    return {name: _median_step(of_name) for name, of_name in spans.items()}


def fit(setup: Setup, num_steps: int, num_blocks: int, times: Callback, **options: Any) -> None:
    """Train so many blocks for so many steps and the first ones, which do not count."""
    trainer = quiet_trainer(
        max_epochs=1,
        callbacks=[times],
        **options,
    )
    samples: Any = torch.zeros((num_steps + NUM_WARM_UP_STEPS) * setup.num_microbatches, FEATURES)
    model = EmulatedModel(num_blocks, setup.seconds)
    trainer.fit(model, DataLoader(samples, batch_size=setup.num_microbatches))


def _median_step(spans: list[tuple[Moment, Moment]]) -> Moment:
    """Return the median from the first rank's start to the last one's end, and of a rank's work."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, spans[NUM_WARM_UP_STEPS:])
    steps = list(zip(*of_ranks, strict=True))
    return Moment(
        median(max(e.wall for _, e in step) - min(b.wall for b, _ in step) for step in steps),
        median(mean(end.busy - began.busy for began, end in step) for step in steps),
    )


def theory(setup: Setup) -> dict[str, float]:
    """Return the makespans of what the two execute."""
    schedule = setup.build()
    costs = Costs(setup.seconds, setup.seconds, setup.seconds)
    plans = {"ours": lower(schedule), "torch": schedule, "bare": lower(schedule)}
    return {name: simulate(plan, costs).makespan for name, plan in plans.items()}


def run_ranks(setups: list[Setup], num_steps: int) -> list[dict[str, Moment]]:
    """Measure setups of equal size; Lightning starts this script again for the other ranks."""
    command = [sys.executable, "-m", "examples.benchmarks.emulated", "--steps", str(num_steps)]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        plans = json.dumps([asdict(setup) for setup in setups])
        subprocess.run(
            [*command, "--setups", plans, "--results", str(results)],
            check=True,
            stdout=subprocess.DEVNULL,  # tables of each run's stages
        )
        measured = json.loads(results.read_text())
    return [{name: Moment(*took) for name, took in of_setup.items()} for of_setup in measured]


def sleep_on_time() -> None:
    """Have this process woken within a nanosecond, not 50 us, of when its sleep is over."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)


def rank_main(setups: str, num_steps: int, results: str) -> None:
    """Measure on one rank."""
    sleep_on_time()
    warnings.filterwarnings("ignore")
    measured = [measure(Setup(**setup), num_steps) for setup in json.loads(setups)]
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(measured))


def add_row(table: Table, setup: Setup, took: dict[str, Moment]) -> None:
    """Add what was measured of one setup."""
    promised = theory(setup)
    over = {name: took[name].wall / promised[name] for name in promised}
    table.add_row(
        setup.schedule,
        str(setup.num_ranks),
        str(setup.num_microbatches),
        f"{setup.milliseconds:g}",
        *(f"{took[name].wall * 1e3:.0f}" for name in ("ours", "torch")),
        *(f"{over[name]:.3f}" for name in promised),
        f"{(over['ours'] - 1) / (over['torch'] - 1):.2f}",
        *(f"{took[name].busy * 1e3:.1f}" for name in (*promised, "plain")),
        f"{(took['ours'].busy - took['plain'].busy) / took['torch'].busy:.2f}",
    )


def make_table() -> Table:
    """Make the table's head."""
    table = Table("schedule", title="Steps over their theory")
    names = (
        "p",
        "m",
        "ms",
        "ours, ms",
        "torch, ms",
        "ours / theory",
        "torch / theory",
        "bare / theory",
        "overhead ratio",
        "busy: ours, ms",
        "torch, ms",
        "bare, ms",
        "plain Trainer, ms",
        "(ours - plain) / torch",
    )
    for name in names:
        table.add_column(name, justify="right")
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--p", type=int, nargs="+", default=[2, 4, 8], help="ranks")
    parser.add_argument("--m", type=int, nargs="+", help="microbatches; default: p and 2p")
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[10], help="of F, B and W")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    parser.add_argument("--dw-builder", action="store_true", help="torch's W without the walk")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each")
    parser.add_argument("--setups", help=argparse.SUPPRESS)
    parser.add_argument("--results", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    if "--period" in sys.argv:
        import_module("examples.benchmarks.period").main(
            [argument for argument in sys.argv[1:] if argument != "--period"]
        )
        return
    arguments = parse()
    if arguments.setups:
        rank_main(arguments.setups, arguments.steps, arguments.results)
        return
    table = make_table()
    for p in arguments.p:
        setups = [
            Setup(schedule, p, m, milliseconds, arguments.dw_builder)
            for milliseconds in arguments.milliseconds
            for m in arguments.m or (p, 2 * p)
            for schedule in arguments.schedules
        ]
        for setup, took in zip(setups, run_ranks(setups, arguments.steps), strict=True):
            add_row(table, setup, took)
        table.add_section()
    Console(width=150).print(table)


if __name__ == "__main__":
    main()

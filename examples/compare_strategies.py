"""One GPT, the same batches: one device, ddp, fsdp and three pipelines, side by side.

    python examples/compare_strategies.py
    python examples/compare_strategies.py --devices 4 --width 1024 --depth 16 --batch-size 64

It prints a table and draws ``compare_strategies.png``: seconds of a step, memory of each rank and
the losses, which are equal up to rounding, since all optimize the same mean over the same samples.
Each row trains in processes of its own, with one thread each on a CPU, so that a core stands for a
device. Memory is what the process takes more while it trains than before it has a model; on an
accelerator, the most that torch had allocated there.
"""

import json
import logging
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import lightning_pipeoffload  # noqa: F401 - registers the strategies
from lightning_pipeoffload.demos import GPT, PythonSource

DATA_PARALLEL = ("ddp", "fsdp")  # each rank has its part of every batch
PIPELINES = ("pipeoffload_1f1b", "pipeoffload_zb_h1", "pipeoffload_zb_v")
ROWS = ("one device", *DATA_PARALLEL, *PIPELINES)
WARM_UP = 2  # steps that are not timed


class Row(NamedTuple):
    """What a strategy gave.

    Attributes:
        seconds: of a step.
        memory: MiB of each rank.
        losses: of the whole batch, step by step.
    """

    seconds: float
    memory: list[float]
    losses: list[float]


class InOrder(PythonSource):
    """The same batches in the same order, whoever reads them.

    Args:
        context: bytes of one sequence.
        batch_size: sequences of all ranks together.
        num_readers: ranks that have their own part of each batch.
    """

    def __init__(self, context: int, batch_size: int, num_readers: int) -> None:
        super().__init__(context, batch_size // num_readers)
        self.num_readers = num_readers

    def train_dataloader(self) -> DataLoader:
        """Return every ``num_readers``-th sample; a Trainer's own sampler would shuffle them."""
        reader = self.trainer.global_rank % self.num_readers
        sampler = range(reader, len(self.train_windows), self.num_readers)
        return DataLoader(self.train_windows, self.batch_size, sampler=sampler)


class Sharded(GPT):
    """The same model for fsdp: each rank keeps a part of each block, and gathers it for its use."""

    def configure_model(self) -> None:
        """Shard block by block; torch's own, for Lightning's FSDPStrategy refuses the CPU."""
        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)


class Losses(L.Callback):
    """Writes the loss of each step into a folder.

    Args:
        folder: where to.
        all_ranks: each has its own; else global rank 0 has all, and others would wait to ask.
    """

    def __init__(self, folder: Path, all_ranks: bool) -> None:
        self.folder = folder
        self.all_ranks = all_ranks
        self.losses: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Keep the loss; on an accelerator nobody waits for it yet."""
        if self.all_ranks or trainer.is_global_zero:
            self.losses.append(trainer.callback_metrics["train_loss"])

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Write what there is."""
        if self.all_ranks or trainer.is_global_zero:
            path = self.folder / f"losses-{trainer.global_rank}.json"
            path.write_text(json.dumps([*map(float, self.losses)]))


class Measure(L.Callback):
    """Writes what each rank measures into a folder.

    Args:
        folder: where to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before = resident_bytes("VmRSS")

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        """Start the clock after the warm-up."""
        if trainer.global_step == WARM_UP:
            forget_peak()
            self.start = finished_at()

    def on_train_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Write what there is."""
        seconds = (finished_at() - self.start) / (trainer.global_step - WARM_UP)
        found = {"seconds": seconds, "memory": self.peak()}
        (self.folder / f"rank-{trainer.global_rank}.json").write_text(json.dumps(found))

    def peak(self) -> int:
        """Return the most bytes that this rank has had since the warm-up."""
        if accelerator_in_use():
            return torch.accelerator.max_memory_allocated()
        return resident_bytes("VmHWM") - self.before


def accelerator_in_use() -> bool:
    """Whether this process trains on one."""
    return torch.accelerator.is_available() and torch.accelerator.memory_allocated() > 0


def finished_at() -> float:
    """Return the time when the device has done all that it was given."""
    if accelerator_in_use():
        torch.accelerator.synchronize()
    return time.perf_counter()


def resident_bytes(name: str) -> int:
    """Return a figure of this process's memory, as Linux tells it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def forget_peak() -> None:
    """Let the largest memory so far be what there is now."""
    if accelerator_in_use():
        torch.accelerator.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5")


def strategy_of(row: str, devices: int) -> str | Strategy:
    """Return what goes to the Trainer's ``strategy``."""
    if row == "fsdp":
        return ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)
    return "auto" if row == "one device" else row


def train(row: str, arguments: Namespace) -> None:
    """Train a row, on this rank; write what it measures."""
    logging.getLogger("lightning_pipeoffload").setLevel(logging.WARNING)
    folder = Path(arguments.folder)
    L.seed_everything(1, verbose=False)
    sizes = {"width": arguments.width, "depth": arguments.depth, "context": arguments.context}
    kind = Sharded if row == "fsdp" else GPT
    gpt = kind(**sizes, dropout=0.0, warmup_steps=5, max_steps=arguments.steps)
    trainer = L.Trainer(
        strategy=strategy_of(row, arguments.devices),
        accelerator=arguments.accelerator,
        devices=1 if row == "one device" else arguments.devices,
        max_steps=arguments.steps,
        callbacks=[Measure(folder), Losses(folder, row in DATA_PARALLEL)],
        limit_val_batches=0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    num_readers = arguments.devices if row in DATA_PARALLEL else 1
    trainer.fit(gpt, InOrder(arguments.context, arguments.batch_size, num_readers))


def measure_row(row: str, line: list[str]) -> Row | str:
    """Run this file for one row; return what its ranks measured, or why it failed."""
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, __file__, *line, "--row", row, "--folder", folder],
            env={**os.environ, **threads},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            return (done.stderr.strip().splitlines() or ["no message"])[-1]
        losses = read(folder, "losses-*.json")
        ranks = read(folder, "rank-*.json")
    return Row(
        max(rank["seconds"] for rank in ranks),
        [rank["memory"] / 2**20 for rank in ranks],
        [sum(step) / len(step) for step in zip(*losses, strict=True)],
    )


def read(folder: str, pattern: str) -> list[Any]:
    """Return what the ranks have written, in their order."""
    return [json.loads(path.read_text()) for path in sorted(Path(folder).glob(pattern))]


def make_table(found: dict[str, Row | str]) -> Table:
    """Put the rows together; losses are set against those of the first."""
    table = Table("strategy", "s / step", "MiB of each rank", "last loss", "largest\ndifference")
    expected = next(iter(found.values()))
    for name, row in found.items():
        if isinstance(row, str) or isinstance(expected, str):
            table.add_row(name, "failed", str(row) if isinstance(row, str) else "", "", "")
            continue
        apart = max(abs(a - b) for a, b in zip(row.losses, expected.losses, strict=True))
        memory = ", ".join(f"{bytes_text:.0f}" for bytes_text in row.memory)
        table.add_row(name, f"{row.seconds:.3f}", memory, f"{row.losses[-1]:.4f}", f"{apart:.0e}")
    return table


def draw(found: dict[str, Row | str], path: str) -> None:
    """Draw seconds, memory and losses of the rows that have them."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra: [plot]

    rows = {name: row for name, row in found.items() if not isinstance(row, str)}
    figure = Figure(figsize=(12, 4), layout="constrained")
    seconds, memory, losses = figure.subplots(1, 3)
    names = list(rows)
    seconds.barh(names, [row.seconds for row in rows.values()])
    seconds.set_xlabel("seconds of a step")
    memory.barh(names, [max(row.memory) for row in rows.values()])
    memory.set_xlabel("MiB of the fullest rank")
    memory.tick_params(labelleft=False)
    for axes in (seconds, memory):
        axes.invert_yaxis()
    for width, (name, row) in zip(range(2 * len(rows), 0, -2), rows.items(), strict=True):
        losses.plot(range(1, len(row.losses) + 1), row.losses, label=name, linewidth=width)
    losses.set_xlabel("step")
    losses.set_ylabel("loss, nats per byte")
    losses.legend()
    figure.savefig(path)


def main(arguments: Namespace, line: list[str]) -> None:
    """Measure all rows, one after the other, or be a rank of one."""
    if arguments.row:
        train(arguments.row, arguments)
        return
    found: dict[str, Row | str] = {}
    for row in arguments.rows:
        print(f"{row} ...", flush=True)
        found[row] = measure_row(row, line)
    Console().print(make_table(found))
    draw(found, arguments.picture)


def read_arguments(line: list[str] | None = None) -> Namespace:
    """Return what the command line says."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS, help="against the first")
    parser.add_argument("--picture", default="compare_strategies.png")
    parser.add_argument("--row", choices=ROWS, help="only for the processes that this one starts")
    parser.add_argument("--folder", help="the same")
    return parser.parse_args(line)


if __name__ == "__main__":
    main(read_arguments(), sys.argv[1:])

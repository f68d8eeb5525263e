"""Times of the batches of one fit, for benchmarks that print a line for each kind and run."""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from examples.benchmarks.harness import quiet_trainer
from lightning_pipeoffload import PipeOffloadStrategy


class BatchStarts(L.Callback):
    """Notes when the fit and each batch start: on a clock, and in time of this process."""

    def __init__(self) -> None:
        self.starts: list[tuple[float, float]] = []

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Note the time."""
        self.fit_started = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the time."""
        self.starts.append((time.perf_counter(), time.process_time()))


def train_epoch(run: str, module: L.LightningModule, data: Any, **options: Any) -> BatchStarts:
    """Train an epoch; return when its batches started on this rank.

    Args:
        run: ``strategy:ranks``; the strategy ``pipeoffload_NAME`` has the schedule of that name.
        module: The module.
        data: Its loader.
        **options: More options of the Trainer.
    """
    name, _, devices = run.partition(":")
    starts = BatchStarts()
    trainer = quiet_trainer(
        strategy=_strategy_of(name),
        devices=int(devices),
        max_epochs=1,
        use_distributed_sampler=False,
        callbacks=[starts],
        **options,
    )
    trainer.fit(module, data)
    return starts


def _strategy_of(name: str) -> Any:
    kind, _, schedule = name.partition("_")
    if kind != "pipeoffload":
        return name
    return PipeOffloadStrategy(schedule=schedule) if schedule else PipeOffloadStrategy()


def measure_each(
    given: argparse.Namespace, program: str, option: str, measure: Callable[..., None]
) -> None:
    """Measure one kind and run here; several each in processes of its own.

    Args:
        given: The command line: ``kinds``, ``runs``, and ``option``.
        program: The name of the benchmark's module.
        option: The name of its one other option.
        measure: Called with a kind, a run and the option's value.
    """
    value = getattr(given, option)
    if len(given.kinds) == len(given.runs) == 1:
        warnings.filterwarnings("ignore")
        for name in ("lightning.pytorch", "lightning.fabric", "lightning_pipeoffload"):
            logging.getLogger(name).setLevel(logging.ERROR)
        torch.set_num_threads(1)
        measure(given.kinds[0], given.runs[0], value)
        return
    for kind in given.kinds:
        for run in given.runs:
            own = ["--kinds", kind, "--runs", run, f"--{option}", str(value)]
            subprocess.run([sys.executable, "-m", program, *own], check=True)

"""Fits of a Trainer on one GPU, in one process and in two, for ``gpu_check.py``."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from examples.benchmarks.gpu_pair import run_two
from examples.benchmarks.gpu_part import Function, rows_of
from examples.benchmarks.gpu_parts import forbidding_waits
from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.demos.gpt import GPT


class ForbidWaits(Callback):
    """Forbids them in the fifth batch."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        self.around = forbidding_waits(trainer.strategy.root_device)
        if batch_idx == 4:
            self.around.__enter__()

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """End."""
        if args[-1] == 4:
            self.around.__exit__(None, None, None)


def train(device: torch.device, *callbacks: Callback, resume: str | None = None, **options: Any):
    """Train a small GPT in this process for some batches; return the trainer."""
    torch.manual_seed(0)
    module = GPT(context=64, width=64, depth=8, heads=2, dropout=0.0)
    tokens = torch.randint(256, (64, 65))
    data = [(row[:-1], row[1:]) for row in tokens]
    arguments = {"strategy": "pipeoffload_zb_v", "max_steps": 6, "devices": 1, "logger": False}
    trainer = Trainer(
        accelerator="cpu" if device.type == "cpu" else "auto",
        callbacks=[*callbacks],
        gradient_clip_val=1.0,
        val_check_interval=2,
        enable_model_summary=False,
        **{**arguments, **options},
    )
    loader = DataLoader(data, batch_size=8)
    trainer.fit(module, loader, loader, ckpt_path=resume)
    return trainer


def host_waits_of_a_trainer(device: torch.device) -> Iterator[str]:
    """Nor does the fifth batch of a Trainer with a progress bar."""
    train(device, ForbidWaits(), limit_val_batches=0, enable_checkpointing=False)
    yield "a Trainer with a progress bar: the host waits for nothing"


def fits(device: torch.device) -> Iterator[str]:
    """A fit in bf16-mixed: planned anew, clipped, validated, saved and gone on with."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"precision": "bf16-mixed", "default_root_dir": folder}
        first = train(device, **options)
        file = str(Path(folder) / "half.ckpt")
        first.save_checkpoint(file)
        yield f"6 steps: loss {float(first.callback_metrics['val_loss']):.4f}"
        second = train(device, resume=file, max_steps=12, **options)
        yield f"12 steps, resumed: loss {float(second.callback_metrics['val_loss']):.4f}"
        assert second.global_step == 12


def _train_as_one_of_two(device: torch.device, *callbacks: Callback) -> Trainer:
    gloo = PipeOffloadStrategy(schedule="zb_h1", process_group_backend="gloo")
    return train(
        device, *callbacks, strategy=gloo, num_nodes=2, enable_checkpointing=False,
        enable_progress_bar=False,
    )  # fmt: skip


def be_one_of_two(device: torch.device) -> Iterator[str]:
    """Train as one of two processes."""
    trainer = _train_as_one_of_two(device)
    yield f"{float(trainer.callback_metrics['val_loss']):.6f}"


def two_processes(device: torch.device) -> Iterator[str]:
    """Two processes share a device, over gloo, and come to the loss of one."""
    alone = train(device, enable_checkpointing=False, enable_progress_bar=False)
    expected = float(alone.callback_metrics["val_loss"])
    said = run_two(be_one_of_two, device)
    losses = [_row_of(text) for text in said]
    yield f"validation losses of two processes: {losses}, of one: {expected:.6f}"
    assert all(abs(float(loss) - expected) < 1e-3 for loss in losses)


def _row_of(said: str) -> str:
    rows = rows_of(said)
    if not rows:
        sys.stderr.write(said[-3000:])
        raise RuntimeError("a process has found nothing")
    return rows[0]


class Fail(Callback):
    """Fails on the process of node 1, in a way of accelerators, while the other one trains."""

    def __init__(self, fail: Callable[[torch.device], None]) -> None:
        self._fail = fail

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Fail in the third batch."""
        if trainer.global_rank == 1 and batch_idx == 2:
            self._fail(trainer.strategy.root_device)


def _assert_on_device(device: torch.device) -> None:
    torch.zeros(2, device=device)[torch.tensor([7], device=device)]


def _use_up_memory(device: torch.device) -> None:
    torch.empty(1 << 50, dtype=torch.uint8, device=device)


def be_one_with_an_assert(device: torch.device) -> Iterator[str]:
    """Train as one of two processes, of which one asserts on the device."""
    _train_as_one_of_two(device, Fail(_assert_on_device))
    yield "nothing has happened"


def be_one_out_of_memory(device: torch.device) -> Iterator[str]:
    """Train as one of two processes, of which one asks for too much memory."""
    _train_as_one_of_two(device, Fail(_use_up_memory))
    yield "nothing has happened"


def blame(device: torch.device) -> Iterator[str]:
    """Who fails on the device is named, on both processes."""
    failing: list[Function] = [be_one_with_an_assert, be_one_out_of_memory]
    for function in failing:
        said = run_two(function, device)[0]
        lines = [line for line in said.splitlines() if line.startswith("[pipeoffload]")]
        yield f"{function.__name__}: {lines[-1:]}"
        assert any("because of global rank 1: " in line for line in lines)

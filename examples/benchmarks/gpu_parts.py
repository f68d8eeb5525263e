"""The parts of ``gpu_check.py``: each is a function of a device that yields what it has found.

    python -m examples.benchmarks.gpu_parts exactness

A part raises if something is wrong. They run on the CPU too, for the tests, where they measure
nothing of interest.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from examples.benchmarks import offload_gpu
from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.demos.gpt import GPT
from lightning_pipeoffload.runtime.in_process import InProcessPipeline
from lightning_pipeoffload.runtime.memory.host_memory import HostMemory
from lightning_pipeoffload.runtime.memory.stage_store import OffloadSettings
from lightning_pipeoffload.runtime.memory.streams import CopyLanes, InlineLane, StreamLane
from lightning_pipeoffload.runtime.rank_memory import ActivationMemory
from lightning_pipeoffload.runtime.timing import finished_at
from lightning_pipeoffload.schedule import Costs, Kind, Schedule, build, offload_activations

ROW = "row: "
_CYCLES = 20_000_000
_VOCABULARY = 256


class Model(nn.Module):
    """A GPT with a step."""

    def __init__(self, width: int, depth: int, sequence: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.gpt = GPT(_VOCABULARY, sequence, width, depth, heads=width // 32, dropout=dropout)
        self.sequence = sequence

    def step(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each token from itself and those before it."""
        return functional.cross_entropy(self.gpt(tokens).flatten(0, 1).float(), tokens.flatten())

    def batch(self, size: int) -> Tensor:
        """Return random tokens where the model is."""
        device = next(self.parameters()).device
        return torch.randint(_VOCABULARY, (size, self.sequence), device=device)


def call_step(module: Any, part: Any) -> Tensor:
    return module.step(part)


def is_accelerated(device: torch.device) -> bool:
    return device.type != "cpu"


def gradients(model: Model, batch: Tensor, plan: Schedule, **options: Any) -> dict[str, Tensor]:
    """Return the gradients of a step of a pipeline in this process."""
    pipeline = InProcessPipeline(model, plan, call_step, **options)
    pipeline.run(batch, 1)
    return {n: g for n, g in pipeline.named_gradients().items() if g is not None}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest gradient."""
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    return max(float((found[name] - g).abs().max()) for name, g in expected.items()) / largest


def exactness(device: torch.device) -> Iterator[str]:
    """Gradients over ranks, with dropout, are those of one rank."""
    model = Model(64, 8, 16, dropout=0.1).double().to(device)
    batch = model.batch(8)
    expected = gradients(model, batch, build("gpipe", 1, 8))
    for name in ("zb_h1", "zb_v"):
        for recompute in ("none", "cheap", "full"):
            found = gradients(model, batch, build(name, 2, 8), recompute=recompute)
            error = difference(found, expected)
            yield f"{name}, recompute {recompute}: gradients differ by {error:.1e}"
            assert error < 1e-9


class DelayedLane(StreamLane):
    """Begins each copy late."""

    def copy(self, target: Tensor, source: Tensor, what: str) -> None:
        """Enqueue a delay, and the copy."""
        with self._stream:
            torch.cuda._sleep(_CYCLES)
        super().copy(target, source, what)


def late_copies(device: torch.device) -> Iterator[str]:
    """Copies that come as late as they can change no gradient."""
    model = Model(64, 4, 64).double().to(device)
    batch, schedule = model.batch(4), build("zb_h1", 2, 4)
    plan, _ = offload_activations(schedule, Costs.unit(), 1.0)
    late = partial(DelayedLane, device) if is_accelerated(device) else InlineLane
    host = partial(HostMemory, pinned=is_accelerated(device))

    def memory(device: torch.device) -> ActivationMemory:
        return ActivationMemory(OffloadSettings(device, CopyLanes(late(), late()), host(), 0))

    expected = gradients(model, batch, schedule)
    found = gradients(model, batch, plan, memory=memory)
    error = difference(found, expected)
    yield f"everything offloaded: gradients differ by {error:.1e}"
    assert error < 1e-9


@contextmanager
def forbidding_waits(device: torch.device) -> Iterator[None]:
    """Let whatever makes the host wait for the device raise."""
    if is_accelerated(device):
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if is_accelerated(device):
            torch.cuda.set_sync_debug_mode("default")


def host_waits(device: torch.device) -> Iterator[str]:
    """The fourth step makes the host wait for nothing."""
    model = Model(64, 8, 16).to(device)
    batch = model.batch(8)
    for name in ("1f1b", "zb_h1", "zb_v"):
        pipeline = InProcessPipeline(model, build(name, 2, 8), call_step)
        for _ in range(3):
            pipeline.run(batch, 1)
        with forbidding_waits(device):
            pipeline.run(batch, 1)
        yield f"{name}: the host waits for nothing"


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


def live_bytes(device: torch.device) -> Iterator[str]:
    """What the ledger counts is what the allocator has given."""
    for recompute in ("none", "cheap", "full"):
        model = Model(512, 8, 256).bfloat16().to(device)
        batch = model.batch(8)
        pipeline = InProcessPipeline(model, build("zb_v", 1, 8), call_step, recompute=recompute)
        for _ in range(2):
            pipeline.run(batch, 1)
        before = _allocated(device)
        pipeline.run(batch, 1)
        peak = pipeline.executors[0].memory.ledger.peak_device_bytes
        more = _peak_allocated(device) - before
        yield f"recompute {recompute}: the ledger has {_mib(peak)}, the allocator {_mib(more)}"


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def _allocated(device: torch.device) -> int:
    if not is_accelerated(device):
        return 0
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    return int(torch.accelerator.memory_allocated())


def _peak_allocated(device: torch.device) -> int:
    return int(torch.accelerator.max_memory_allocated()) if is_accelerated(device) else 0


_HOLD = """
extern "C" __global__ void hold(volatile int* released) {
    while (!*released) { }
}
"""


def held_multiprocessors(device: torch.device) -> Iterator[str]:
    """How much slower products are while blocks of threads spin, as NCCL's open receives do."""
    size = 4096 if is_accelerated(device) else 64
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    alone = _seconds_of(lambda: left @ left)
    for num_held in (0, 4, 32, 64):
        with _holding(num_held, device):
            slower = _seconds_of(lambda: left @ left) / alone
        yield f"{num_held} blocks of threads spin: products take {slower:.2f} of their time"


def _seconds_of(run: Callable[[], Any], repetitions: int = 20) -> float:
    run()
    stream = torch.accelerator.current_stream() if torch.accelerator.is_available() else None
    started = time.perf_counter()
    for _ in range(repetitions):
        run()
    if stream is not None:  # not the device, where something may spin
        stream.synchronize()
    return time.perf_counter() - started


@contextmanager
def _holding(num_blocks: int, device: torch.device) -> Iterator[None]:
    """Let so many blocks of 512 threads spin meanwhile."""
    if not num_blocks or not is_accelerated(device):
        yield
        return
    hold = torch.cuda._compile_kernel(_HOLD, "hold")
    released = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    stream = torch.Stream(device, priority=-1)
    with stream:
        hold((num_blocks, 1, 1), (512, 1, 1), (released,))
    try:
        yield
    finally:
        released.fill_(1)
        stream.synchronize()


def split(device: torch.device) -> Iterator[str]:
    """B and W apart against both at once, and the host's time for a microbatch."""
    model = Model(1024 if is_accelerated(device) else 64, 8, 512).bfloat16().to(device)
    batch, seconds = model.batch(8), {}
    for name in ("1f1b", "zb_h1"):
        pipeline = InProcessPipeline(model, build(name, 1, 8), call_step)
        for _ in range(3):
            finished_at()
            started = time.perf_counter()
            pipeline.run(batch, 1)
            on_host = (time.perf_counter() - started) / 8
            whole = finished_at() - started
        times = pipeline.executors[0].timer.action_seconds()
        seconds[name] = sum(s for (kind, _), s in times.items() if kind is not Kind.F)
        yield (
            f"{name}: {on_host * 1e3:.2f} ms of the host for a microbatch, a step takes "
            f"{whole * 1e3:.1f} ms"
        )
    yield f"B + W over fused: {seconds['zb_h1'] / seconds['1f1b']:.3f}"


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


def _start(rank: int, port: int, function: str, device: torch.device) -> subprocess.Popen[str]:
    """Start a process that is one of two on this device: for Lightning a node with one."""
    environment = {
        **os.environ,
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": str(rank)},
    }
    command = [sys.executable, "-m", _MODULE, function, device.type]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


_MODULE = "examples.benchmarks.gpu_parts"


def _run_two(function: str, device: torch.device, port: int) -> list[str]:
    """Run a function of this file in two processes; return what they say."""
    processes = [_start(rank, port, function, device) for rank in range(2)]
    return [process.communicate()[0] for process in processes]


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
    said = _run_two("be_one_of_two", device, 29571)
    losses = [_row_of(text) for text in said]
    yield f"validation losses of two processes: {losses}, of one: {expected:.6f}"
    assert all(abs(float(loss) - expected) < 1e-3 for loss in losses)


def _row_of(said: str) -> str:
    rows = [line.removeprefix(ROW) for line in said.splitlines() if line.startswith(ROW)]
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
    for port, function in enumerate(("be_one_with_an_assert", "be_one_out_of_memory"), 29581):
        said = _run_two(function, device, port)[0]
        lines = [line for line in said.splitlines() if line.startswith("[pipeoffload]")]
        yield f"{function}: {lines[-1:]}"
        assert any("because of global rank 1: " in line for line in lines)


def offload(device: torch.device) -> Iterator[str]:
    """Offloading at one size, against none."""
    sizes = ("4096", "8192") if is_accelerated(device) else ("32", "64")
    options = ["--ranks", "2", "--chunks", "2", "--microbatches", "4", "--steps", "2"]
    hidden, sequence = sizes
    heads = ["--head-size", "128" if is_accelerated(device) else "16"]
    offload_gpu.main(["--hidden", hidden, "--sequence", sequence, *options, *heads])
    yield "the table is above"


if __name__ == "__main__":
    _name, *_types = sys.argv[1:]
    _kind: Any = torch.device(_types[0]) if _types else torch.accelerator.current_accelerator()
    for _found in globals()[_name](_kind or torch.device("cpu")):
        print(f"{ROW}{_found}", flush=True)

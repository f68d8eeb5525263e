"""The parts of ``gpu_check.py`` that need one process and no Trainer.

Each is a function of a device that yields what it has found, and raises if something is wrong. They
run on the CPU too, for the tests, where they are small and measure nothing of interest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from examples.benchmarks import offload_gpu
from examples.benchmarks.gpu_process import is_accelerated, needing
from examples.benchmarks.offload_gpu import Line, Size, Variant
from lightning_pipeoffload.demos import GPT
from lightning_pipeoffload.runtime.device import CopyLanes, Lane, StreamLane, make_lanes
from lightning_pipeoffload.runtime.measure import CopySpeed, measure_copy_speed
from lightning_pipeoffload.runtime.memory import HostMemory, OffloadSettings
from lightning_pipeoffload.runtime.run import ActivationMemory
from lightning_pipeoffload.runtime.step import sharing_casts
from lightning_pipeoffload.schedule import (
    SCHEDULES,
    Costs,
    Schedule,
    build,
    offload_activations,
)
from tests.support.in_process import InProcessPipeline

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


def gradients(
    model: Model, batch: Tensor, plan: Schedule, size: int = 1, **options: Any
) -> dict[str, Tensor]:
    """Return the gradients of a step of a pipeline in this process."""
    pipeline = InProcessPipeline(model, plan, call_step, **options)
    pipeline.run(batch, size)
    return {n: g for n, g in pipeline.named_gradients().items() if g is not None}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest gradient."""
    assert found.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    return max(float((found[name] - g).abs().max()) for name, g in expected.items()) / largest


def schedules() -> list[str]:
    """Return the names of schedules that can be built here."""
    return [name for name in SCHEDULES if name != "optpipe" or find_spec("ortools")]


def exactness(device: torch.device) -> Iterator[str]:
    """Gradients of all schedules, with dropout and recomputation, are those of one rank."""
    model = Model(64, 8, 16, dropout=0.1).double().to(device)
    batch = model.batch(8)
    expected = gradients(model, batch, build("gpipe", 1, 8))
    names = ["zb_h1", "zb_v", *(n for n in schedules() if is_accelerated(device))]
    for name in dict.fromkeys(names):
        ways = ("none", "cheap", "full") if name in names[:2] else ("none",)
        for recompute in ways:
            found = gradients(model, batch, build(name, 2, 8), recompute=recompute)
            error = difference(found, expected)
            yield f"{name}, recompute {recompute}: gradients differ by {error:.1e}"
            assert error < 1e-9
    pipeline = InProcessPipeline(model, build("zb_h1", 2, 8), call_step)
    pipeline.run(batch, 1)
    stages = [stage for rank in pipeline.ranks for stage in rank.stages.values()]
    deferred = sum(stage.memories[0].deferred_flops or 0 for stage in stages)
    share = deferred / sum(rank.weight_flops for rank in pipeline.ranks)
    yield f"zb_h1: {share:.0%} of the weight gradients wait for W"
    assert share == 1


class DelayedLane(StreamLane):
    """Begins each copy late."""

    def copy(self, target: Tensor, source: Tensor, what: str) -> None:
        """Enqueue a delay, and the copy."""
        with self._stream:
            torch.cuda._sleep(_CYCLES)
        super().copy(target, source, what)


def all_offloaded(schedule: Schedule) -> Schedule:
    """Return a schedule that offloads each activation, whatever its copies take."""
    return offload_activations(schedule, Costs.unit(), 1.0)[0]


def offloading_memory(device: torch.device, lanes: CopyLanes | None = None) -> ActivationMemory:
    """Return memory that offloads small tensors too."""
    host = HostMemory(pinned=is_accelerated(device))
    return ActivationMemory(OffloadSettings(device, lanes or make_lanes(device), host, 0))


def late_copies(device: torch.device) -> Iterator[str]:
    """Copies that come as late as they can change no gradient."""
    model = Model(64, 4, 64).double().to(device)
    batch, schedule = model.batch(4), build("zb_h1", 2, 4)
    late = partial(DelayedLane, device) if is_accelerated(device) else Lane

    def memory(device: torch.device) -> ActivationMemory:
        return offloading_memory(device, CopyLanes(late(), late()))

    expected = gradients(model, batch, schedule)
    found = gradients(model, batch, all_offloaded(schedule), memory=memory)
    error = difference(found, expected)
    yield f"everything offloaded: gradients differ by {error:.1e}"
    assert error < 1e-9


def late_copies_under_sanitizer(device: torch.device) -> Iterator[str]:
    """Nor does torch's sanitizer see a stream that reads before another has written."""
    if is_accelerated(device):
        # Private: TORCH_CUDA_SANITIZER works at the import of torch alone. Imported here, since its
        # import alone calls Python at each allocation and event, which halves the speed of a step.
        from torch.cuda import _sanitizer  # noqa: PLC0415

        _sanitizer.enable_cuda_sanitizer()
    yield from late_copies(device)


class CountCasts(TorchDispatchMode):
    """Counts those of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and call."""
        is_cast = func is torch.ops.aten._to_copy.default
        self.count += is_cast and isinstance(args[0], nn.Parameter)
        return func(*args, **(kwargs or {}))


def casts(device: torch.device) -> Iterator[str]:
    """In bfloat16, recomputation casts no weight once more, and changes gradients by rounding."""
    model = Model(64, 4, 64).to(device)
    batch = model.batch(4)
    counts: list[int] = []
    plain: dict[str, Tensor] = {}
    for recompute in ("none", "cheap", "full"):
        pipeline = InProcessPipeline(model, build("zb_v", 1, 4), call_step, recompute=recompute)
        mixed = torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
        with mixed, sharing_casts(device):
            pipeline.run(batch, 1)
        with mixed, CountCasts() as counted, sharing_casts(device):
            pipeline.run(batch, 1)
        found = {n: g for n, g in pipeline.named_gradients().items() if g is not None}
        plain, counts = plain or found, [*counts, counted.count]
        error = difference(found, plain)
        yield f"recompute {recompute}: {counts[-1]} casts, gradients differ by {error:.1e}"
        assert error < _ROUNDING
    assert len({*counts}) == 1


_ROUNDING = 0.05  # of bfloat16, added up by atomic operations


@needing("pytest")
def tests_of_gpus(device: torch.device) -> Iterator[str]:
    """The tests that need a GPU, in parallel as far as they come; those that fail are named."""
    options = ["--numprocesses", "8"] if find_spec("xdist") and is_accelerated(device) else []
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", *options, *_TESTS]
    found: Counter[str] = Counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            outcome = next((word for word in ("PASSED", "FAILED", "ERROR") if word in line), None)
            if outcome is None or "::" not in line or " - " in line:  # the summary has them again
                sys.stderr.write(line)
                continue
            found[outcome] += 1
            if outcome != "PASSED":
                yield line.strip()
            elif found[outcome] % 50 == 0:
                yield f"{found[outcome]} have passed so far"
    yield f"{dict(found)}"


_TESTS = ["tests/runtime/test_gpu.py", "tests/odc/test_on_demand_gpu.py"]


def offload(device: torch.device) -> Iterator[str]:
    """Offloading against none, at the first size whose copies fit within its compute."""
    if (settings := os.environ.get("PYTORCH_ALLOC_CONF")) and is_accelerated(device):
        torch._C._accelerator_setAllocatorSettings(settings)  # torch may have read others before
    speed = measure_copy_speed(device)
    to_host, to_device = speed.to_host / 1e9, speed.to_device / 1e9
    yield f"{to_host:.1f} GB/s to the host, {to_device:.1f} back; both at once {speed.overlap:.2f}"
    sizes = _SIZES if is_accelerated(device) else _SMALL_SIZES
    estimates = _estimated_ratios(device, speed, sizes)
    yield "k by one size: " + ", ".join(f"{h} x {s}: {k:.2f}" for (h, s), k in estimates.items())
    hidden = [size for size, k in estimates.items() if k <= 1]
    size = _size(*(hidden[0] if hidden else min(estimates, key=estimates.__getitem__)), device)
    lines: list[Line] = []
    # The last of all variants second: planned peaks are compared with its.
    variants = [
        Variant("uniform"), offload_gpu.VARIANTS[-1], Variant("po_f"), Variant("zb_v"),
        Variant("zb_v", offloads=True), *offload_gpu.VARIANTS[1:-1],
    ]  # fmt: skip
    for variant in dict.fromkeys(variants):
        line = offload_gpu.measure(size, variant, speed, _STEPS)
        if line is not None:
            lines.append(line)
            yield _last_row(lines)


def _last_row(lines: list[Line]) -> str:
    *_, cells = offload_gpu.cells(lines)
    return ", ".join(f"{n} {c}" for n, c in zip(offload_gpu.HEADER[2:], cells[2:], strict=True))


def _estimated_ratios(
    device: torch.device, speed: CopySpeed, sizes: list[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Return k of each size, from the first one's: it falls as hidden layers and texts grow."""
    line = offload_gpu.measure(_size(*sizes[0], device), Variant("uniform"), speed, 1)
    if line is None:
        raise RuntimeError("not even the first size fits into the device's memory")
    # PipeOffload's formula 1: bytes are as hidden * sequence, operations so many times as much.
    work = {(hidden, sequence): 6 * hidden + sequence for hidden, sequence in sizes}
    return {size: line.k * work[sizes[0]] / more for size, more in work.items()}


def _size(hidden: int, sequence: int, device: torch.device) -> Size:
    head_size = 128 if is_accelerated(device) else 16
    return Size(hidden, sequence, 2, 2, 4, 0, head_size, device, _HOST_BYTES)


_STEPS = 2
_HOST_BYTES = 90 << 30  # of a machine whose files tell of less than it has
_SIZES = [(4096, 8192), (8192, 8192), (8192, 16384), (4096, 65536), (8192, 32768)]
_SMALL_SIZES = [(32, 64), (32, 128)]

"""What a message takes from rank to rank, and what an open receive costs who computes meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from examples.benchmarks.gpu_pair import rows_of, run_two
from examples.benchmarks.gpu_part import is_accelerated
from lightning_pipeoffload.runtime.measure.link_speed import answer_hop, time_hop
from lightning_pipeoffload.runtime.mesh import RankMesh
from lightning_pipeoffload.runtime.payload import TensorSpec
from lightning_pipeoffload.runtime.transport import ProcessGroupTransport
from lightning_pipeoffload.schedule import build

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
    _synchronize()
    started = time.perf_counter()
    for _ in range(repetitions):
        run()
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    """Wait for the current stream: not for the device, where something may spin."""
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()


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
        _spin(hold, num_blocks, released)
    try:
        yield
    finally:
        released.fill_(1)
        stream.synchronize()


def _spin(hold: Any, num_blocks: int, released: Tensor) -> None:
    """Let blocks of 512 threads spin on the current stream until a number on the host is set."""
    hold((num_blocks, 1, 1), (512, 1, 1), (released,))


def _messages(device: torch.device) -> list[Tensor]:
    sizes = (1 << 16, 1 << 23, 1 << 26) if is_accelerated(device) else (1 << 10, 1 << 16)
    return [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]


def _row(message: Tensor, seconds: float) -> str:
    rate = message.nbytes / seconds / 1e9
    return f"a hop of {message.nbytes >> 10} KiB takes {seconds * 1e3:.3f} ms, {rate:.2f} GB/s"


def hops_of_processes(device: torch.device) -> Iterator[str]:
    """What a hop takes between two processes: over gloo by way of the host, and over NCCL."""
    yield from _hops_between(be_one_end_of_gloo, device)
    # Of this module, not torch.accelerator, whose answer asks the driver: processes fork after it.
    if is_accelerated(device) and torch.get_device_module(device).device_count() > 1:
        yield from _hops_between(be_one_end_of_nccl, device)
    else:
        yield "NCCL: untried, it wants two GPUs"


def _hops_between(end: Callable[[torch.device], Iterator[str]], device: torch.device) -> list[str]:
    rows = rows_of(run_two(end, device)[0])
    if len(rows) < 2:
        raise RuntimeError(f"a process has found {rows}")
    return rows


def be_one_end_of_gloo(device: torch.device) -> Iterator[str]:
    """Be one of two processes that share a device."""
    yield from _be_one_end("gloo", device)


def be_one_end_of_nccl(device: torch.device) -> Iterator[str]:
    """Be one of two processes, each with a device of its own."""
    own = torch.device(device.type, int(os.environ["NODE_RANK"]))
    torch.accelerator.set_device_index(own.index)
    yield from _be_one_end("nccl", own)


def _be_one_end(backend: str, device: torch.device) -> Iterator[str]:
    rank = int(os.environ["NODE_RANK"])
    dist.init_process_group(backend, rank=rank, world_size=2)
    mesh = RankMesh(build("zb_v", 2, 4), rank)  # whose ranks are the global ones
    transport = ProcessGroupTransport(mesh, {(0, 1), (1, 0)}, device)
    for message in _messages(device):
        if rank == 0:
            seconds = time_hop(transport, 0, 1, [message])
            yield f"{backend}: {_row(message, seconds)}"
        else:
            answer_hop(transport, 1, 0, [TensorSpec.of(message)])
    dist.destroy_process_group()

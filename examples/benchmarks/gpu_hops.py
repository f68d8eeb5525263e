"""What a message takes from rank to rank, and what an open receive costs who computes meanwhile."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from examples.benchmarks.gpu_pair import rows_of, run_two
from examples.benchmarks.gpu_part import is_accelerated
from lightning_pipeoffload.runtime.measure import hop_speed
from lightning_pipeoffload.runtime.measure.hop_speed import answer_hop, time_hop
from lightning_pipeoffload.runtime.mesh import RankMesh
from lightning_pipeoffload.runtime.payload import TensorSpec
from lightning_pipeoffload.runtime.transport import ProcessGroupTransport
from lightning_pipeoffload.schedule import Action, build
from lightning_pipeoffload.schedule.messages import recv_of

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


class Edges:
    """What two threads send each other: room for each message, made before a receive is open.

    Memory that the driver gives meanwhile may wait for all kernels, those that spin among them.
    """

    def __init__(self, message: Tensor) -> None:
        pinned = is_accelerated(message.device)
        names = [f"{place}{i}" for i in range(_EXCHANGES) for place in ("0RECV_B", "1RECV_F")]
        self.room = {Action.parse(name): torch.empty_like(message) for name in names}
        self.has_come = {action: threading.Event() for action in self.room}
        self.released = {
            action: torch.zeros(1, dtype=torch.int32, pin_memory=pinned) for action in self.room
        }


_EXCHANGES = 4


class ThreadTransport:
    """Of a rank that is a thread; on the CPU the host waits for a message."""

    def __init__(self, edges: Edges) -> None:
        self._edges = edges

    def post(self, receive: Action, peer: int, specs: list[TensorSpec]) -> None:
        """There is room already."""

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        """Copy a message to its room."""
        receive = recv_of(send)
        self._edges.room[receive].copy_(tensors[0])
        self._edges.has_come[receive].set()

    def wait(self, receive: Action) -> list[Tensor]:
        """Wait for a message."""
        self._edges.has_come[receive].wait()
        return [self._edges.room[receive]]

    def release(self, send: Action) -> None:
        """Nothing is kept."""

    def finish_step(self) -> None:
        """Nothing is kept."""

    def finished_at(self) -> float:
        """Return the host's clock: the CPU has done all that it was given."""
        return time.perf_counter()


class SpinningTransport(ThreadTransport):
    """Whose open receive is a kernel that spins until the other rank's send has come.

    The streams of a thread stand for a device of its own: it waits for those alone.
    """

    def __init__(self, edges: Edges, device: torch.device) -> None:
        super().__init__(edges)
        self._computing = torch.accelerator.current_stream()
        self._sending, self._receiving = torch.Stream(device), torch.Stream(device, priority=-1)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._hold = torch.cuda._compile_kernel(_HOLD, "hold")
        is_released = torch.ones(1, dtype=torch.int32, pin_memory=True)
        _spin(self._hold, 1, is_released)  # loads it, which the driver may not do while one spins
        torch.accelerator.synchronize()

    def post(self, receive: Action, peer: int, specs: list[TensorSpec]) -> None:
        """Let a kernel spin."""
        with self._receiving:
            _spin(self._hold, _RECEIVING_BLOCKS, self._edges.released[receive])

    def send(self, send: Action, peer: int, tensors: list[Tensor]) -> None:
        """Copy a message to its room, and release the other's kernel then."""
        receive = recv_of(send)
        self._sending.wait_stream(self._computing)
        with self._sending:
            self._edges.room[receive].copy_(tensors[0])
            self._edges.released[receive].copy_(self._one, non_blocking=True)

    def wait(self, receive: Action) -> list[Tensor]:
        """Let the compute stream wait for the kernel."""
        self._computing.wait_stream(self._receiving)
        return [self._edges.room[receive]]

    def finished_at(self) -> float:
        """Wait for what this thread has given to the device, open receives included."""
        for stream in (self._computing, self._sending, self._receiving):
            stream.synchronize()
        return time.perf_counter()


_RECEIVING_BLOCKS = 32


def hops_of_threads(device: torch.device) -> Iterator[str]:
    """A hop is measured where open receives spin: who waited for one of them would hang."""
    for message in _messages(device):
        yield _row(message, _time_between_threads(message))


def _time_between_threads(message: Tensor) -> float:
    """Return the seconds of a hop between two ranks that are threads."""
    edges, own = Edges(message), threading.local()
    are_ready = threading.Barrier(2)

    def be_rank(exchange: Callable[[ThreadTransport], Any]) -> Any:
        with _own_stream(message.device):
            own.transport = _transport(edges, message.device)
            are_ready.wait()
            return exchange(own.transport)

    def finished_at() -> float:
        return own.transport.finished_at()

    with (
        mock.patch.object(hop_speed, "finished_at", finished_at),
        ThreadPoolExecutor(2) as threads,
    ):
        timed = threads.submit(be_rank, lambda t: time_hop(t, 0, 1, [message]))
        specs = [TensorSpec.of(message)]
        threads.submit(be_rank, lambda t: answer_hop(t, 1, 0, specs)).result()
        return timed.result()


def _own_stream(device: torch.device) -> Any:
    return torch.Stream(device) if is_accelerated(device) else nullcontext()


def _transport(edges: Edges, device: torch.device) -> ThreadTransport:
    return SpinningTransport(edges, device) if is_accelerated(device) else ThreadTransport(edges)

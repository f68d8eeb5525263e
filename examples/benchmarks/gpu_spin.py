"""NCCL's stand-in where two processes share one GPU, which NCCL refuses.

A message is one kernel at each end, on a stream of its own, that spins on a number in memory which
both processes see (CUDA IPC), as NCCL's kernels do::

    send     spin until the message before was taken;  copy to the box;     sent = n
    receive  spin until message n was sent;            copy out of the box; taken = n

On the CPU a thread does the same in memory that both map.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from examples.benchmarks.gpu_process import compile_kernel, is_accelerated
from examples.benchmarks.gpu_ranks import BUSIEST, in_two_processes, steps_of_schedules
from lightning_pipeoffload.runtime.comm import (
    HostGroup,
    allocate_shared_memory,
    as_bytes,
    transport,
)

_PASS_ON = """
extern "C" __global__ void pass_on(volatile int* awaited, int least, volatile char* to,
                                   const volatile char* from, int size, volatile int* told,
                                   int number) {
    if (threadIdx.x == 0) {
        while (*awaited < least) { }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += blockDim.x) {
        to[i] = from[i];
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        *told = number;
    }
}
"""
_LARGEST, _FLAG = 1 << 20, 128  # bytes of a message, and from one number to the next


class SpinGroup(dist.ProcessGroup):
    """Two processes, one of which sends to the other.

    Args:
        device: The device of both.
        store: The store of the group.
        rank: This process's rank in the group.
        size: How many processes there are.
    """

    def __init__(self, device: torch.device, store: Any, rank: int, size: int, *_: Any) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # of the bases that C++ has
        box, *_rest = allocate_shared_memory(
            2 * _FLAG + _LARGEST, device, rank, _Meeting(store, rank, size)
        )
        self._sent, self._taken = box[:4].view(torch.int32), box[_FLAG:][:4].view(torch.int32)
        self._box = box[2 * _FLAG :]
        self._number = 0
        self._lane = SpinStream(device) if is_accelerated(device) else SpinThread()

    def send(self, tensors: list[Tensor], place: int, tag: int) -> Any:
        """Start to send a tensor; return what waits until it is in the box."""
        (data,) = map(as_bytes, tensors)
        number = self._next(data)
        return self._lane.run(
            self._taken, number - 1, self._box, data, data.numel(), self._sent, number
        )

    def recv(self, tensors: list[Tensor], place: int, tag: int) -> Any:
        """Start to receive a tensor; return what waits until it is there."""
        (data,) = map(as_bytes, tensors)
        number = self._next(data)
        return self._lane.run(
            self._sent, number, data, self._box, data.numel(), self._taken, number
        )

    def _next(self, data: Tensor) -> int:
        if data.numel() > _LARGEST:
            raise ValueError(f"{data.numel()} bytes in a message; the box has {_LARGEST}")
        self._number += 1
        return self._number


class _Meeting(HostGroup):
    """Processes that tell each other objects by the store of a group that is being made."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._count = 0

    def gather(self, obj: Any) -> list[Any]:
        """Return the objects of all."""
        self._count += 1
        self._store.set(f"{self._count} of {self._rank}", pickle.dumps(obj))
        names = [f"{self._count} of {rank}" for rank in range(self._size)]
        return [pickle.loads(self._store.get(name)) for name in names]

    def barrier(self) -> None:
        """Wait for all."""
        self.gather(None)


class SpinStream:
    """Runs kernels in order, each after what the compute stream has when it is given."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device, priority=-1)
        self._kernel = compile_kernel(_PASS_ON, "pass_on")

    def run(self, *arguments: Any) -> Any:
        """Enqueue one; return what lets the compute stream wait for it."""
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            self._kernel((1, 1, 1), (512, 1, 1), arguments)
        done = self._stream.record_event()

        def wait() -> None:
            torch.accelerator.current_stream().wait_event(done)

        return SimpleNamespace(wait=wait, is_completed=done.query)


class SpinThread:
    """Does what the kernels do, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def run(self, *arguments: Any) -> Any:
        """Let the thread do it; return what waits for it."""
        passed_on = self._thread.submit(_pass_on, *arguments)
        return SimpleNamespace(wait=passed_on.result, is_completed=passed_on.done)


def _pass_on(
    awaited: Tensor, least: int, to: Tensor, source: Tensor, size: int, told: Tensor, number: int
) -> None:
    while awaited.item() < least:
        time.sleep(1e-4)  # the cores are others' too
    to[:size].copy_(source[:size])
    told.fill_(number)


def spinning_messages(device: torch.device) -> Iterator[str]:
    """Schedules run where receives spin on the device, of 32 hardware queues and of one."""
    for count in ("32", "1"):
        yield f"CUDA_DEVICE_MAX_CONNECTIONS={count}"
        queues = {"CUDA_DEVICE_MAX_CONNECTIONS": count}
        yield from in_two_processes(be_spinning_rank, device, 25, **queues)
        if not is_accelerated(device):
            break


def be_spinning_rank(device: torch.device) -> Iterator[str]:
    """Be one of the two processes."""
    rank = int(os.environ["NODE_RANK"])
    dist.Backend.register_backend("spin", partial(SpinGroup, device), devices=["cpu", "cuda"])
    dist.init_process_group("spin", rank=rank, world_size=2)
    # The transport takes gloo for tensors of the host, whatever the default group is.
    with mock.patch.object(transport, "_backend_for", return_value="spin"):
        yield from steps_of_schedules(rank, device, BUSIEST)


def waits_during_a_kernel(device: torch.device) -> Iterator[str]:
    """What the driver does not do while a kernel spins: a receive must not be open there."""
    x, pin = torch.ones(8, device=device), is_accelerated(device)
    if (settings := os.environ.get("PYTORCH_ALLOC_CONF")) and pin:
        torch._C._accelerator_setAllocatorSettings(settings)  # torch may have read others before
    kept: list[Tensor] = []
    numel = 1 << 28 if pin else 8  # more than allocators have at hand

    def free() -> None:
        kept.clear()
        if pin:
            torch.accelerator.empty_cache()

    total = torch.accelerator.get_memory_info(device)[1] if pin else 1000

    def take(tenths: int) -> None:
        kept.append(torch.empty(total * tenths // 10, dtype=torch.uint8, device=device))

    calls: dict[str, Callable[[], Any]] = {
        "a kernel's first load": lambda: torch.special.i1e(x),
        "cudaMalloc": lambda: kept.append(torch.empty(numel, device=device)),
        "cudaHostAlloc": lambda: torch.empty(numel, pin_memory=pin),
        "cudaFree": free,
        "a module's load": lambda: pin and compile_kernel(_PASS_ON, "pass_on"),
        # Of what was freed and is kept, for more than is free apart from it.
        _FLUSH: lambda: take(7),
    }
    for name, call in calls.items():
        if name == _FLUSH:
            take(6)
            kept.clear()
        spinning = start_spinning(device)
        started = time.perf_counter()
        call()
        seconds = time.perf_counter() - started
        waited = "waits" if spinning() else "does not wait"
        yield f"{name} {waited} for a kernel that spins ({seconds * 1e3:.1f} ms)"


_FLUSH = "a flush of the allocator"


def start_spinning(device: torch.device) -> Callable[[], bool]:
    """Let a kernel spin for a second or so; return what says whether it has ended, and waits."""
    if not is_accelerated(device):
        return lambda: False
    torch.accelerator.synchronize()
    stream = torch.Stream(device)
    with stream:
        torch.cuda._sleep(2_000_000_000)  # cycles
        done = stream.record_event()

    def has_ended() -> bool:
        ended = bool(done.query())
        done.synchronize()
        return ended

    return has_ended

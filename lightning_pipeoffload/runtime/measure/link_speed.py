"""Measured speeds of copies, latencies of messages and offsets of clocks.

Copies: each direction alone, and both at once. If both at once take about as long as one after the
other, a plan with one shared lane is better (PipeOffload, section 3).

Messages: a stage's rank sends the stage's output, and the next rank sends it back; half of that
time is the P2P latency. Edges are measured one by one, so that messages do not share a link.

Clocks: the root sends a message to each rank, which answers with its time. The rank reads its clock
between the times at which the root sends and receives::

    root    sends at s                  receives at r        offset = t - (s + r) / 2
    rank                 answers with t                      error  = (r - s) / 2
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime import TensorSpec
from lightning_pipeoffload.runtime.comm import PipelineGroup, Transport, reporting_lost_peers
from lightning_pipeoffload.runtime.device import make_lanes, synchronized_time
from lightning_pipeoffload.runtime.run import Executor
from lightning_pipeoffload.schedule import Action, Kind, Schedule

_BYTES = 32 << 20
_COPIES = 5
_MESSAGES = 3
_QUESTIONS = 16
_TAG = 1  # checksums of batches have 0
# Two lanes are worth it where two copies at once take less than this share of one after the other.
_WORTH_TWO_LANES = 0.8


@dataclass(frozen=True)
class CopySpeed:
    """Speeds of copies.

    Attributes:
        to_host: Bytes per second, device to host.
        to_device: Bytes per second, host to device.
        overlap: Time of simultaneous copies both ways, over the time of one after the other.
    """

    to_host: float
    to_device: float
    overlap: float

    @property
    def num_lanes(self) -> int:
        """Lanes of a plan: 1 if copies in both directions slow each other down, else 2."""
        return 2 if self.overlap < _WORTH_TWO_LANES else 1

    @property
    def copy_slowdown(self) -> float:
        """Factor by which a copy takes longer in the plan, with both lanes in use, than alone."""
        return max(1.0, 2 * self.overlap) if self.num_lanes == 2 else 1.0


def measure_copy_speed(
    device: torch.device, num_bytes: int = _BYTES, meet: Callable[[], None] = lambda: None
) -> CopySpeed:
    """Measure copies of ``num_bytes`` between a device and this host.

    Args:
        meet: A barrier over the devices that copy at the same time.
    """
    pinned = device.type != "cpu"
    on_device = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    on_host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    lanes = make_lanes(device)

    def offload() -> None:
        lanes.d2h.copy(on_host[0], on_device[0], "a measurement")

    def reload() -> None:
        lanes.h2d.copy(on_device[1], on_host[1], "a measurement")

    def both() -> None:
        offload()
        reload()

    seconds = [_median_seconds(copy, meet) for copy in (offload, reload, both)]
    return CopySpeed(
        num_bytes / seconds[0], num_bytes / seconds[1], seconds[2] / (seconds[0] + seconds[1])
    )


def _median_seconds(copy: Callable[[], None], meet: Callable[[], None]) -> float:
    copy()  # touches the memory
    meet()
    return median(_seconds(copy) for _ in range(_COPIES))


def _seconds(copy: Callable[[], None]) -> float:
    started = synchronized_time()
    copy()
    return synchronized_time() - started


def measure_latencies(
    executor: Executor, schedule: Schedule, device: torch.device
) -> dict[int, float]:
    """Return the P2P latency, in seconds, from each stage of this rank to the next on another.

    All ranks call it, between two steps.
    """
    seconds = {}
    for stage in filter(schedule.crosses_ranks, range(schedule.num_stages - 1)):
        sender, receiver = schedule.rank_of(stage), schedule.rank_of(stage + 1)
        if executor.rank == sender:
            specs = executor.stages[stage].record_of(executor.microbatches[0]).specs_out
            tensors = [torch.zeros(s.shape, dtype=s.dtype, device=device) for s in specs]
            seconds[stage] = measure_latency(executor.transport, stage, receiver, tensors)
        elif executor.rank == receiver:
            specs = executor.stages[stage + 1].record_of(executor.microbatches[0]).specs_in
            echo_messages(executor.transport, stage + 1, sender, specs)
    return seconds


def measure_latency(transport: Transport, stage: int, peer: int, tensors: list[Tensor]) -> float:
    """Return the P2P latency from ``stage`` to the next one, whose rank must answer."""
    specs = [TensorSpec(tensor.shape, tensor.dtype, False) for tensor in tensors]
    seconds = []
    for repetition in range(1 + _MESSAGES):
        receive = Action(Kind.RECV_B, stage, repetition)
        # Before the post: synchronized_time() would wait for NCCL's receive kernel too.
        started = synchronized_time()
        transport.post(receive, peer, specs)
        transport.send(Action(Kind.SEND_F, stage, repetition), peer, tensors)
        transport.wait(receive)
        seconds.append(synchronized_time() - started)
    transport.free_unused_buffers()
    return median(seconds[1:]) / 2  # the first one waits until the peer answers at all


def echo_messages(transport: Transport, stage: int, peer: int, specs: list[TensorSpec]) -> None:
    """Send each message of the previous stage back; its rank runs :func:`measure_latency`."""
    for repetition in range(1 + _MESSAGES):
        receive = Action(Kind.RECV_F, stage, repetition)
        transport.post(receive, peer, specs)
        tensors = transport.wait(receive)
        transport.send(Action(Kind.SEND_B, stage, repetition), peer, tensors)
    transport.free_unused_buffers()


class ClockOffset(NamedTuple):
    """Seconds by which a rank's ``time.perf_counter()`` leads the root's, and the error bound."""

    seconds: float = 0.0
    error: float = 0.0


def measure_clock_offsets(group: PipelineGroup) -> list[ClockOffset] | None:
    """Return the clock offsets of all ranks on the root, None elsewhere; all ranks call it."""
    with reporting_lost_peers("lost a rank while comparing clocks"):
        if group.global_rank != group.root:
            _serve_clock(group, group.root)
            return None
        return [
            ClockOffset() if rank == group.root else _measure_offset(group, rank)
            for rank in group.global_ranks
        ]


def _measure_offset(group: PipelineGroup, rank: int) -> ClockOffset:
    """Return the offset from the fastest of several round trips."""
    offsets = []
    message = torch.zeros(1, dtype=torch.float64)
    peer = dist.get_group_rank(group.host_group, rank)
    for _ in range(_QUESTIONS):
        sent = time.perf_counter()
        group.host_group.send([message], peer, _TAG).wait()
        group.host_group.recv([message], peer, _TAG).wait()
        received = time.perf_counter()
        offsets.append(ClockOffset(float(message) - (sent + received) / 2, (received - sent) / 2))
    return min(offsets, key=lambda offset: offset.error)


def _serve_clock(group: PipelineGroup, root: int) -> None:
    peer = dist.get_group_rank(group.host_group, root)
    asked = torch.zeros(1, dtype=torch.float64)
    for _ in range(_QUESTIONS):
        group.host_group.recv([asked], peer, _TAG).wait()
        now = torch.tensor([time.perf_counter()], dtype=torch.float64)
        group.host_group.send([now], peer, _TAG).wait()

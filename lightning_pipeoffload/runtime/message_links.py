"""How one tensor goes over a directed edge between two processes.

As bytes, for NCCL knows fewer dtypes than torch. Over NCCL through buffers that are used again: its
group tells the allocator that another stream uses what it sends and receives, which is free
only when all of that stream is done, so each message of a step would take fresh memory. gloo reads
and writes the host's memory: on an accelerator messages go through pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime import late_values
from lightning_pipeoffload.runtime.payload import TensorSpec

Wait = Callable[[], Any]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes of the same memory."""
    # Not view(-1): a dimension of one element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True)
class MessageSettings:
    """How messages go over NCCL; on by default, and to be measured.

    Attributes:
        max_channels: Channels that an edge may use; an open receive takes a multiprocessor for
            each. None: as many as NCCL likes.
        is_urgent: Whether messages go before what waits for the device already.
        keeps_buffers: Whether messages go through buffers that are used again.
    """

    max_channels: int | None = 4
    is_urgent: bool = True
    keeps_buffers: bool = True

    def options(self, timeout: timedelta | None) -> Any:
        """Return what a group of NCCL with this timeout is made with."""
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=self.is_urgent)
        if timeout is not None:
            options._timeout = timeout  # private: torch warns where it differs from the group's
        if self.max_channels is not None:
            options.config.min_ctas = 1
            options.config.max_ctas = self.max_channels
        return options


DEFAULTS = MessageSettings()


@dataclass(frozen=True)
class Link:
    """One end of a directed edge: the group whose messages go over it, and who is at the other.

    Attributes:
        group: The group of torch.distributed.
        place: The peer's rank in the group.
        global_rank: The global rank of the peer.
        device: The device of the tensors.
    """

    group: Any
    place: int
    global_rank: int
    device: torch.device

    def send(self, tensor: Tensor, tag: int) -> Wait:
        """Start sending a tensor; return what waits until it has gone."""
        data = as_bytes(_plain(tensor))
        return partial(_wait, self._send_bytes(data, tag), data)

    def receive(self, spec: TensorSpec, tag: int) -> Wait:
        """Start receiving a tensor; return what waits until it is there, and returns it."""
        tensor = _empty(spec, self.device)
        return partial(_wait, self._receive_bytes(as_bytes(tensor), tag), tensor)

    # The group's own methods: dist.isend and irecv cost 90 us more a message on gloo.

    def _send_bytes(self, data: Tensor, tag: int) -> Any:
        return self.group.send([data], self.place, tag)

    def _receive_bytes(self, data: Tensor, tag: int) -> Any:
        return self.group.recv([data], self.place, tag)


class HostLink(Link):
    """Over gloo, between the memories of two hosts: it knows no dtypes, so none is one of bytes."""

    def send(self, tensor: Tensor, tag: int) -> Wait:
        """Start sending; return what waits until it has gone."""
        data = _plain(tensor)
        return partial(_wait, self._send_bytes(data, tag), data)

    def receive(self, spec: TensorSpec, tag: int) -> Wait:
        """Start receiving; return what waits for the tensor, and returns it."""
        tensor = _empty(spec, self.device)
        return partial(_wait, self._receive_bytes(tensor, tag), tensor)


class BufferRing:
    """Buffers that messages use one after the other.

    The compute lane waits for the message before the ring has the buffer back::

        send     tensor -- copy --> buffer -- NCCL --> peer;  wait;  back into the ring
        receive  peer -- NCCL --> buffer;  wait;  -- copy --> tensor;  back into the ring

    Sizes are rounded up by an eighth at most. The ring lets go of those that were not in use for
    longest where it would have twice of what was ever in use at once: lengths may vary.

    A plan's limit counts them among what the device held beside activations when it was measured.

    Args:
        device: The device of the messages.

    Attributes:
        num_bytes: The number of bytes of all buffers.
    """

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._in_use = self._most_in_use = 0
        self._device = device
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return a buffer that no message is in, with room for so many bytes."""
        size = _size_class(num_bytes)
        self._in_use += size
        self._most_in_use = max(self._most_in_use, self._in_use)
        for place, buffer in enumerate(self._free):
            if buffer.numel() == size:
                return self._free.pop(place)
        self.num_bytes += size
        while self._free and self.num_bytes > 2 * self._most_in_use:
            self.num_bytes -= self._free.pop(0).numel()
        with torch.inference_mode(False):  # a validation may come first
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def give_back(self, buffer: Tensor) -> None:
        """Let another message use a buffer, once the compute lane has waited for its last."""
        self._in_use -= buffer.numel()
        self._free.append(buffer)


def _size_class(num_bytes: int) -> int:
    step = max(512, (1 << num_bytes.bit_length()) >> 4)
    return max(1, -(-num_bytes // step)) * step


@dataclass(frozen=True)
class BufferedLink(Link):
    """A link over which tensors go by way of a ring's buffers.

    Attributes:
        ring: The ring of this rank.
    """

    ring: BufferRing

    def send(self, tensor: Tensor, tag: int) -> Wait:
        """Copy a tensor and start sending; return what waits until it has gone."""
        buffer = self.ring.take(tensor.nbytes)
        data = buffer[: tensor.nbytes]
        data.copy_(as_bytes(_plain(tensor)))
        work = self._send_bytes(data, tag)

        def wait() -> None:
            work.wait()
            self.ring.give_back(buffer)

        return wait

    def receive(self, spec: TensorSpec, tag: int) -> Wait:
        """Start receiving a tensor; return what waits for it and takes it out."""
        buffer = self.ring.take(spec.num_bytes)
        data = buffer[: spec.num_bytes]
        work = self._receive_bytes(data, tag)

        def wait() -> Tensor:
            work.wait()
            tensor = _empty(spec, self.device)
            as_bytes(tensor).copy_(data)
            self.ring.give_back(buffer)
            return tensor

        return wait


@dataclass(frozen=True)
class StagedLink(Link):
    """A link over which tensors of an accelerator go by way of the host.

    Nobody waits where a message is sent: a thread does, until it is on the host. Who receives one
    waits on the host.
    """

    sender: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def send(self, tensor: Tensor, tag: int) -> Wait:
        """Start copying and sending; return what waits until it has gone."""
        read = late_values.start_reading(as_bytes(_plain(tensor)))

        def send() -> Wait:
            host = read()
            return partial(_wait, self._send_bytes(host, tag), host)

        sending = self.sender.submit(send)
        return lambda: sending.result()()

    def receive(self, spec: TensorSpec, tag: int) -> Wait:
        """Start receiving; return what waits and starts copying to the device."""
        pinned = self.device.type != "cpu"
        host = torch.empty(spec.num_bytes, dtype=torch.uint8, pin_memory=pinned)
        work = self._receive_bytes(host, tag)

        def wait() -> Tensor:
            work.wait()
            tensor = _empty(spec, self.device)
            as_bytes(tensor).copy_(host, non_blocking=True)
            return tensor

        return wait


def _wait(work: Any, kept: Tensor) -> Tensor:
    """Wait for a work; what it reads or writes is kept until then."""
    work.wait()
    return kept


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its elements, one after the other."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach().contiguous()


def _empty(spec: TensorSpec, device: torch.device) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)

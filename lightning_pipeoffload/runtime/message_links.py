"""How tensors go over a directed edge between two processes.

As bytes, for NCCL knows fewer dtypes than torch. Over NCCL through buffers that are used again: its
group tells the allocator that another stream uses what it sends and receives, which is free
only when all of that stream is done, so each message of a step would take fresh memory. gloo reads
and writes the host's memory: on an accelerator messages go through pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime import late_values
from lightning_pipeoffload.runtime.payload import TensorSpec


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
class Link:
    """One end of a directed edge: the group whose messages go over it, and who is at the other.

    Tensors go as they are, through a ring's buffers, or through the host's memory. A send never
    waits: where tensors go through the host, a thread waits for the copy. Who receives one waits.

    Attributes:
        group: The group of torch.distributed.
        place: The peer's rank in the group.
        global_rank: The global rank of the peer.
        device: The device of the tensors.
        has_dtypes: Whether the group knows dtypes, so that tensors go as bytes; gloo knows none.
        ring: The buffers of this rank that messages go through.
        sender: The thread that sends what has been copied to the host.
    """

    group: Any
    place: int
    global_rank: int
    device: torch.device
    has_dtypes: bool = False
    ring: BufferRing | None = None
    sender: ThreadPoolExecutor | None = None

    # The group's own methods: dist.isend and irecv cost 90 us more a message on gloo.

    def send(self, tensors: Sequence[Tensor], tag: int) -> Message:
        """Start sending tensors, the first with this tag, the others with those that follow."""
        message = Message(self)
        for place, tensor in enumerate(map(_plain, tensors), tag):
            if self.sender is not None:
                # What reads the copy also keeps it until the message has gone.
                room: Any = late_values.start_reading(as_bytes(tensor))
                work = self.sender.submit(self._send_read, room, place)
            else:
                room, data = tensor, as_bytes(tensor) if self.has_dtypes else tensor
                if self.ring is not None:
                    room = self.ring.take(tensor.nbytes)
                    data = room[: tensor.nbytes].copy_(as_bytes(tensor))
                work = self.group.send([data], self.place, place)
            message.works.append(work)
            message.rooms.append(room)
        return message

    def receive(self, specs: Sequence[TensorSpec], tag: int) -> Message:
        """Start receiving tensors, the first with this tag, the others with those that follow."""
        message = Message(self, specs)
        for place, spec in enumerate(specs, tag):
            if self.ring is not None:
                room = self.ring.take(spec.num_bytes)
                data = room[: spec.num_bytes]
            elif self.sender is not None:
                pinned = self.device.type != "cpu"
                data = room = torch.empty(spec.num_bytes, dtype=torch.uint8, pin_memory=pinned)
            else:
                room = _empty(spec, self.device)
                data = as_bytes(room) if self.has_dtypes else room
            message.works.append(self.group.recv([data], self.place, place))
            message.rooms.append(room)
        return message

    def _send_read(self, read: Callable[[], Tensor], tag: int) -> Any:
        return self.group.send([read()], self.place, tag)


class Message:
    """Tensors on their way over a link; what torch reads or writes is kept until they are there.

    Args:
        link: The link.
        specs: The tensors that are received; None where they are sent.
    """

    __slots__ = ("link", "rooms", "specs", "works")

    def __init__(self, link: Link, specs: Sequence[TensorSpec] | None = None) -> None:
        self.link = link
        self.specs = specs
        self.works: list[Any] = []
        self.rooms: list[Any] = []

    def wait(self) -> list[Tensor]:
        """Wait until all have gone or are there; return those that were received."""
        link, found = self.link, []
        for place, (work, room) in enumerate(zip(self.works, self.rooms, strict=True)):
            if self.specs is None:
                (work.result() if link.sender is not None else work).wait()
            else:
                work.wait()
                found.append(self._received(self.specs[place], room))
            if link.ring is not None:
                link.ring.give_back(room)
        return found

    def _received(self, spec: TensorSpec, room: Tensor) -> Tensor:
        if self.link.ring is None and self.link.sender is None:
            return room
        tensor = _empty(spec, self.link.device)
        as_bytes(tensor).copy_(room[: spec.num_bytes], non_blocking=self.link.sender is not None)
        return tensor


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory holds its elements, one after the other."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach().contiguous()


def _empty(spec: TensorSpec, device: torch.device) -> Tensor:
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)

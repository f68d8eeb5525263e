"""What the process that reads sends to the other ranks of its replica: batches, and their headers.

A message is a header and the values that belong to it. The reader sends batches ahead of their use,
in its order, and waits for nobody; others ask for a message when it has been sent for long, so that
its large values are on their way, by threads of gloo alone, during the step before::

    reader      messages 0, 1, 2   step 0   message 3   step 1   message 4   step 2
    others      messages 0, 1      step 0   message 2   step 1   message 3   step 2

A header and small values go in one frame of fixed size, and what does not fit into it follows.
Large values do not go through it: processes of the reader's machine copy them out of memory that it
shares with them, others receive a message for each::

    reader              value -- copy --> slot 0, frame    value -- copy --> slot 1, frame
    on its machine                        frame, slot 0 -- copy --> value, done
    elsewhere                             frame, message -- copy --> value

The reader uses a slot again two messages later, when all have received what was in it. Both copies
are made by a thread during the step before; it draws no random numbers, and unpickles nothing of
the user's.
"""

from __future__ import annotations

import itertools
import pickle
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime.batch import Packet, ReceivedPacket
from lightning_pipeoffload.runtime.comm.host_group import NO_LIMIT, HostGroup
from lightning_pipeoffload.runtime.comm.mesh import RankMesh
from lightning_pipeoffload.runtime.comm.shared_bytes import MemoryFile, map_file, read_memory_file
from lightning_pipeoffload.runtime.comm.transport import CommunicationThread, reporting_lost_peers

_FRAME, _REST, _VALUE, _DONE = range(4)  # gloo's tags
_FRAME_BYTES = 4096
_LENGTH_BYTES = 8
_TOKEN_BYTES = 16
_MOST_INLINE = 16 << 10  # bytes of a batch that is sent with its header
_LOST = "lost a rank while batches were sent"


class BatchChannel:
    """This process's end of the messages from the reader of its replica.

    Args:
        mesh: The processes; all of them make their ends together.

    Attributes:
        is_needed: Whether the replica has other processes than the reader.
        is_reader: Whether this process is the reader.
        reader: The reader's global rank.
    """

    def __init__(self, mesh: RankMesh) -> None:
        self.is_reader, self.reader, self._device = mesh.is_reader, mesh.reader, mesh.device
        members = mesh.members_of_replica
        self.is_needed = len(members) > 1
        self._waits_since: float | None = None
        if not self.is_needed:
            return
        self._group = mesh.make_replica_group("batches", backend="gloo", timeout=NO_LIMIT)
        self._source = dist.get_group_rank(self._group, mesh.reader)
        is_mapping = self._gather_can_map()
        self._maps_slots = is_mapping[dist.get_rank(self._group)]
        others = [rank for rank in range(len(members)) if rank != self._source]
        slots = [_SendSlot(number, self._group, others, is_mapping) for number in range(2)]
        self._slots = itertools.cycle(slots)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._mappings: list[tuple[Any, Tensor]] = [(None, self._buffer)] * 2
        self._done: Any = None
        doing = "sending" if mesh.is_reader else "receiving"
        self._thread = CommunicationThread(f"while {doing} a batch", mesh.fail)
        self._last: Future[None] | None = None  # of what the thread has to do

    def _gather_can_map(self) -> list[bool]:
        """Return whether each process can map memory of the reader's."""
        group, token = HostGroup(self._group), secrets.token_bytes(_TOKEN_BYTES)
        with MemoryFile() as file:
            if self.is_reader and not file.try_reserve(_TOKEN_BYTES):
                map_file(file.path, _TOKEN_BYTES).copy_(_bytes_to_tensor(token))
            path, token = group.gather((file.path, token))[self._source]
            return group.gather(not self.is_reader and read_memory_file(path) == token)

    def send(self, header: Any, values: Sequence[Any] = ()) -> Callable[[], None]:
        """Send a header, and the values that belong to it.

        Returns:
            A function that waits until the values may change.

        Raises:
            TypeError: A value cannot be pickled.
        """
        packets = [*map(Packet, values)]
        large = [packet for packet in packets if packet.num_bytes > _MOST_INLINE]
        slot = next(self._slots)
        with reporting_lost_peers(_LOST):
            parts = slot.acquire_buffers([packet.num_bytes for packet in large])
        message = pickle.dumps((header, [*map(_described, packets)], slot.place), 5)
        if large or not (self._last is None or self._last.done()):
            self._last = slot.job = self._thread.submit(slot.send, message, large, parts)
        else:
            slot.send(message, large, parts)
            return _go_on
        if not all(packet.is_on_host for packet in large):
            self._last.result()
        return self._last.result

    def receive(self) -> tuple[Any, list[ReceivedValue]]:
        """Wait for the next header; return it, with the values that belong to it."""
        self._waits_since = time.monotonic()
        try:
            with reporting_lost_peers(_LOST):
                header, described, place = pickle.loads(self._message())
        finally:
            self._waits_since = None
        if self._last is not None:
            self._last.result()  # it copies out of memory that is used again
        sizes = [data for _, data in described if isinstance(data, int)]
        in_slot = bool(sizes) and self._maps_slots and place is not None
        parts = iter(_split(self._mapped(*place) if in_slot else self._room_for(sizes), sizes))
        contents, works = [], []
        for structure, data in described:
            is_large = isinstance(data, int)
            part = next(parts) if is_large else _bytes_to_tensor(data)
            contents.append(ReceivedPacket(structure, part))
            if is_large and not in_slot:
                works.append(self._group.recv([part], self._source, _VALUE))
        if sizes:
            self._last = self._thread.submit(self._finish_receive, contents, works, in_slot)
        else:
            self._finish_receive(contents, works, in_slot)
        return header, [ReceivedValue(each, self._last, self._device) for each in contents]

    def _finish_receive(
        self, contents: Sequence[ReceivedPacket], works: Sequence[Any], in_slot: bool
    ) -> None:
        with reporting_lost_peers(_LOST):
            for work in works:
                work.wait()
            for each in contents:
                each.copy()
            if in_slot:
                self._send_done()

    def _send_done(self) -> None:
        done = torch.zeros(1, dtype=torch.uint8)
        if self._done is not None:
            self._done[0].wait()
        self._done = self._group.send([done], self._source, _DONE), done

    def _mapped(self, number: int, path: str, size: int) -> Tensor:
        if self._mappings[number][0] != (path, size):
            self._mappings[number] = (path, size), map_file(path, size)
        return self._mappings[number][1]

    def _message(self) -> bytes:
        frame = torch.empty(_FRAME_BYTES, dtype=torch.uint8)
        self._group.recv([frame], self._source, _FRAME).wait()
        head = frame.numpy().tobytes()
        length = int.from_bytes(head[:_LENGTH_BYTES], "little")
        message = head[_LENGTH_BYTES : _LENGTH_BYTES + length]
        if length > len(message):
            rest = torch.empty(length - len(message), dtype=torch.uint8)
            self._group.recv([rest], self._source, _REST).wait()
            message += rest.numpy().tobytes()
        return message

    def _room_for(self, sizes: Sequence[int]) -> Tensor:
        self._buffer = _grown(self._buffer, sum(sizes))
        return self._buffer

    def seconds_waited(self) -> float:
        """Return for how long the present wait for a message has lasted, 0 if none; thread-safe."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since


class _SendSlot:
    """What one message is sent from; the next but one is sent from it again.

    Large values are in memory that other processes map, or are messages of their own.

    Attributes:
        place: What others map the memory by; None: they receive large values.
        job: What sends the message; None: nothing that is still to be done.
    """

    def __init__(
        self, number: int, group: Any, others: Sequence[int], is_mapping: Sequence[bool]
    ) -> None:
        self._number, self._group, self._others = number, group, others
        self._mapping = [rank for rank in others if is_mapping[rank]]
        self._file: MemoryFile | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.job: Future[None] | None = None
        self._works: list[tuple[Any, Tensor]] = []  # with tensors, which gloo reads until then
        self.place: tuple[int, str, int] | None = None

    def acquire_buffers(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return memory for each of some values, once all have received what was sent before."""
        if self.job is not None:
            self.job.result()
        while self._works:
            self._works.pop()[0].wait()
        if sum(sizes) > self._memory.numel():
            self._grow(sum(sizes))
        return _split(self._memory, sizes)

    def _grow(self, num_bytes: int) -> None:
        size, old, file = num_bytes + num_bytes // 4, self._file, MemoryFile()
        if self._mapping and not file.try_reserve(size):
            self._memory, self._file = map_file(file.path, size), file
            self.place = self._number, file.path, size
        else:
            file.close()
            self._memory, self._file, self.place = _grown(self._memory, size), None, None
        if old is not None:
            old.close()

    def send(self, message: bytes, packets: Sequence[Packet], parts: Sequence[Tensor]) -> None:
        """Send a message, and large values by the memory that they have."""
        with torch.inference_mode():  # they may be of an evaluation
            for packet, part in zip(packets, parts, strict=True):
                packet.write(part)
        frame, room = torch.empty(_FRAME_BYTES, dtype=torch.uint8), _FRAME_BYTES - _LENGTH_BYTES
        head = len(message).to_bytes(_LENGTH_BYTES, "little") + message[:room]
        frame[: len(head)] = _bytes_to_tensor(head)
        self._start_sends(frame, _FRAME, self._others)
        if len(message) > room:
            self._start_sends(_bytes_to_tensor(message[room:]), _REST, self._others)
        mapping = self._mapping if self.place is not None else []
        for part in parts:
            self._start_sends(part, _VALUE, [rank for rank in self._others if rank not in mapping])
        for rank in mapping if parts else ():
            answer = torch.empty(1, dtype=torch.uint8)
            self._works.append((self._group.recv([answer], rank, _DONE), answer))

    def _start_sends(self, tensor: Tensor, tag: int, ranks: Sequence[int]) -> None:
        self._works += [(self._group.send([tensor], rank, tag), tensor) for rank in ranks]


class ReceivedValue:
    """A value that is on its way from the reader.

    Args:
        contents: What has come.
        job: Copies it; None: it has been copied.
        device: The accelerator of this process.
    """

    def __init__(
        self, contents: ReceivedPacket, job: Future[None] | None, device: torch.device
    ) -> None:
        self._contents, self._job, self._device = contents, job, device

    def get(self) -> Any:
        """Wait for it, and return it, in memory of its own."""
        if self._job is not None:
            self._job.result()
        return self._contents.rebuild(self._device)


def _described(packet: Packet) -> tuple[bytes, int | bytes]:
    """Return what announces a packet: its structure, with its bytes or their number."""
    if packet.num_bytes > _MOST_INLINE:
        return packet.structure, packet.num_bytes
    data = torch.empty(packet.num_bytes, dtype=torch.uint8)
    packet.write(data)
    return packet.structure, data.numpy().tobytes()


def _bytes_to_tensor(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _grown(memory: Tensor, num_bytes: int) -> Tensor:
    if num_bytes <= memory.numel():
        return memory
    with torch.inference_mode(False):  # a validation may come first
        return torch.empty(num_bytes, dtype=torch.uint8)


def _split(memory: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [*memory[: sum(sizes)].split([*sizes])] if sizes else []


def _go_on() -> None:
    """Wait for nothing."""

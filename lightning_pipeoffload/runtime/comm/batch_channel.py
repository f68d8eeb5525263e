"""What the process that reads sends to the other ranks of its replica: batches, and their headers.

Batches are sent in the order of their use, and each in the message of another one where it was read
ahead. So it is on its way while the step before runs, by threads of gloo alone; no process waits
for it but where it uses it::

    reader      reads 0, 1   [header 0, batches 0 and 1]   step 0   reads 2   [header 1, batch 2]
    others                   header 0, batch 0             step 0             header 1, batch 1

A message is a frame of fixed size, and what does not fit into it. Large values do not go through
it: processes of the reader's machine copy them out of memory that it shares with them, others
receive a message for each::

    reader              value -- copy --> slot 0, frame    value -- copy --> slot 1, frame
    on its machine                        frame, slot 0 -- copy --> value, done
    elsewhere                             frame, message -- copy --> value

The reader writes into a slot again, two messages later, when all have said that they are done.
"""

from __future__ import annotations

import pickle
import secrets
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime.batch.packet import Packet, unpack
from lightning_pipeoffload.runtime.comm.host_group import NO_LIMIT
from lightning_pipeoffload.runtime.comm.mesh import RankMesh
from lightning_pipeoffload.runtime.comm.shared_bytes import MemoryFile, map_file, read_memory_file
from lightning_pipeoffload.runtime.comm.transport import blaming_peers

_FRAME, _REST, _VALUE, _ANSWER, _DONE = range(5)  # gloo's tags
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
        ranks = (dist.get_group_rank(self._group, rank) for rank in members)
        self._others = [rank for rank in ranks if rank != self._source]
        self._sent: list[tuple[Any, Tensor]] = []
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._readers_of_slots: list[int] | None = None  # not known before a large value
        self._slots = [_Slot(number) for number in range(2)]
        self._coming: list[Received] = []
        self._maps_slots = self._is_slot_in_use = False
        self._mappings: list[tuple[Any, Tensor]] = [(None, self._buffer)] * 2
        self._done: Any = None

    # On the reader

    def send(self, header: Any, values: Sequence[Any] = ()) -> None:
        """Send a header and some values, such as the batches that are used next.

        Raises:
            TypeError: A value cannot be pickled.
        """
        packets = [*map(Packet, values)]
        large = [packet for packet in packets if packet.num_bytes > _MOST_INLINE]
        sizes = [packet.num_bytes for packet in large]
        with blaming_peers(_LOST):
            if large and self._readers_of_slots is None:
                self._offer_slots()
            while self._sent:  # received long ago, or else the others are late
                self._sent.pop()[0].wait()
            slot = self._slot_of(sum(sizes)) if large and self._readers_of_slots else None
            parts = self._parts_of_buffer(sizes) if slot is None else _split(slot.memory, sizes)
            for packet, part in zip(large, parts, strict=True):
                packet.write(part)
            place = None if slot is None else slot.place
            self._post(pickle.dumps((header, [*map(_described, packets)], place), 5))
            readers = self._readers_of_slots or () if slot is not None else ()
            for part in parts:
                self._post_tensor(part, _VALUE, [r for r in self._others if r not in readers])
            if slot is not None:
                slot.expect_done(self._group, readers)

    def _offer_slots(self) -> None:
        """Find the processes that can map memory of this one; all of them answer once."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        with MemoryFile() as file:
            file.reserve(_TOKEN_BYTES)
            map_file(file.path, _TOKEN_BYTES).copy_(_tensor_of(token))
            self._post(pickle.dumps((_Offer(file.path, token), [], None), 5))
            answers = {rank: torch.zeros(1, dtype=torch.uint8) for rank in self._others}
            works = [self._group.recv([a], rank, _ANSWER) for rank, a in answers.items()]
            for work in works:
                work.wait()
        self._readers_of_slots = [rank for rank, answer in answers.items() if answer.item()]

    def _slot_of(self, num_bytes: int) -> _Slot | None:
        """Return the next slot, once it may be written; None where there is no memory for it."""
        self._slots.reverse()
        slot = self._slots[0]
        slot.wait()
        return slot if slot.grow(num_bytes) else None

    def _post(self, message: bytes) -> None:
        frame, room = torch.empty(_FRAME_BYTES, dtype=torch.uint8), _FRAME_BYTES - _LENGTH_BYTES
        head = len(message).to_bytes(_LENGTH_BYTES, "little") + message[:room]
        frame[: len(head)] = _tensor_of(head)
        self._post_tensor(frame, _FRAME, self._others)
        if len(message) > room:
            self._post_tensor(_tensor_of(message[room:]), _REST, self._others)

    def _post_tensor(self, tensor: Tensor, tag: int, ranks: Sequence[int]) -> None:
        # With the tensor, which gloo reads until it is sent.
        self._sent += [(self._group.send([tensor], rank, tag), tensor) for rank in ranks]

    # On the others

    def receive(self) -> tuple[Any, list[Received]]:
        """Wait for the next header; return it, with the values that come with it."""
        self._waits_since = time.monotonic()
        try:
            with blaming_peers(_LOST):
                header, described, place = pickle.loads(self._message())
                if isinstance(header, _Offer):
                    self._answer(header)
                    header, described, place = pickle.loads(self._message())
        finally:
            self._waits_since = None
        self._finish()
        sizes = [data for _, data in described if isinstance(data, int)]
        in_slot = self._maps_slots and place is not None
        memory = self._mapped(*place) if in_slot else None
        parts = iter(self._parts_of_buffer(sizes) if memory is None else _split(memory, sizes))
        values = []
        for structure, data in described:
            if not isinstance(data, int):
                values.append(Received(structure, _tensor_of(data), self._device))
                continue
            part = next(parts)
            work = None if in_slot else self._group.recv([part], self._source, _VALUE)
            values.append(Received(structure, part, self._device, work))
            self._coming.append(values[-1])
        self._is_slot_in_use = in_slot
        return header, values

    def _finish(self) -> None:
        """Copy what came with the last message out of memory that is used again."""
        while self._coming:
            self._coming.pop().get()
        if self._is_slot_in_use:
            done = torch.zeros(1, dtype=torch.uint8)
            with blaming_peers(_LOST):
                self._done = self._group.send([done], self._source, _DONE), done

    def _answer(self, offer: _Offer) -> None:
        self._maps_slots = read_memory_file(offer.path) == offer.token
        answer = torch.tensor([self._maps_slots], dtype=torch.uint8)
        self._group.send([answer], self._source, _ANSWER).wait()

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

    def _parts_of_buffer(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return a part of the buffer for each message of so many bytes; it grows as needed."""
        if sum(sizes) > self._buffer.numel():
            with torch.inference_mode(False):  # a validation may come first
                self._buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        return _split(self._buffer, sizes)

    def seconds_waited(self) -> float:
        """Return for how long this process has waited for the reader by now; thread-safe."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since


class _Offer(NamedTuple):
    """A file in memory that has the token, for whoever can read it."""

    path: str
    token: bytes


class _Slot:
    """Memory of the reader that other processes map, for the large values of one message."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._file: MemoryFile | None = None
        self._done: list[tuple[Any, Tensor]] = []
        self.memory = torch.empty(0, dtype=torch.uint8)

    @property
    def place(self) -> tuple[int, str, int]:
        """What another process maps it by."""
        assert self._file is not None
        return self._number, self._file.path, self.memory.numel()

    def grow(self, num_bytes: int) -> bool:
        """Return whether it has so many bytes; it is made anew where it has fewer."""
        if self.memory.numel() >= num_bytes:
            return True
        file, size = MemoryFile(), num_bytes + num_bytes // 4
        if file.reserve(size):
            return False
        self.memory, old, self._file = map_file(file.path, size), self._file, file
        if old is not None:
            old.close()
        return True

    def expect_done(self, group: Any, ranks: Sequence[int]) -> None:
        """Expect each of the ranks to say that it has copied what is written now."""
        for rank in ranks:
            answer = torch.empty(1, dtype=torch.uint8)
            self._done.append((group.recv([answer], rank, _DONE), answer))

    def wait(self) -> None:
        """Wait until all have copied what was written last."""
        while self._done:
            self._done.pop()[0].wait()


class Received:
    """A value that is on its way from the reader.

    Args:
        structure: How to rebuild it; see :func:`unpack`.
        buffer: Its bytes, once they have come.
        device: The accelerator of this process.
        work: What receives the bytes; None: they are there.
    """

    def __init__(self, structure: bytes, buffer: Tensor, device: torch.device, work: Any = None):
        self._structure, self._buffer, self._device, self._work = structure, buffer, device, work
        self._value: Any = None
        self._is_there = False

    def get(self) -> Any:
        """Wait for it, and return it, in memory of its own."""
        if not self._is_there:
            if self._work is not None:
                with blaming_peers(_LOST):
                    self._work.wait()
            self._value = unpack(self._structure, self._buffer, self._device)
            self._is_there = True
        return self._value


def _described(packet: Packet) -> tuple[bytes, int | bytes]:
    """Return what announces a packet: its structure, with its bytes or their number."""
    if packet.num_bytes > _MOST_INLINE:
        return packet.structure, packet.num_bytes
    data = torch.empty(packet.num_bytes, dtype=torch.uint8)
    packet.write(data)
    return packet.structure, data.numpy().tobytes()


def _tensor_of(data: bytes) -> Tensor:
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _split(memory: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [*memory[: sum(sizes)].split([*sizes])] if sizes else []

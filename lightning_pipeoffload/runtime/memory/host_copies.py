"""Saved storages on their way to the host, there, and on their way back.

Copies run on lanes of their own. The compute lane allocates and frees every device buffer, after
waiting for the copy that used it; so the allocator needs no ``record_stream``. A copy back waits
for the copy there, whoever waited for that one in between. What one stage keeps of one microbatch::

    compute  F  offload  . . .  free  . . .  reload  . . .  arrive  B
    d2h           [ to the host ]
    h2d                                        [ back ]
    device   =========================         ======================
    host          ==========================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_pipeoffload.runtime.memory.host_memory import HostMemory, Slab
from lightning_pipeoffload.runtime.memory.saved_tensor import SavedStorage
from lightning_pipeoffload.runtime.memory.streams import CopyLanes
from lightning_pipeoffload.schedule.actions import Part

_ALIGNMENT = 64

Rooms = dict[Part, int]


@dataclass(eq=False)
class _Group:
    """Storages of one part that went to the host together, and come back together."""

    part: Part
    storages: Sequence[SavedStorage]
    slab: Slab
    copied: Any
    loaded: Any = None


class HostCopies:
    """What one stage and microbatch has on the host.

    Args:
        lanes: The lanes that copies run on.
        host: Memory for what is copied.
        rooms: The most bytes that each part has taken of the host so far.
    """

    def __init__(self, lanes: CopyLanes, host: HostMemory, rooms: Rooms) -> None:
        self._lanes = lanes
        self._host = host
        self._rooms = rooms
        self._leaving: list[_Group] = []
        self._away: list[_Group] = []
        self._returning: list[_Group] = []

    def offload(self, part: Part, storages: Sequence[SavedStorage]) -> None:
        """Start the copy of storages to the host.

        Raises:
            WrittenInPlaceError: A tensor was written to since it was saved.
            HostMemoryError: There is no room.
            CopyError: A copy cannot be started.
        """
        self.measure(part, storages)
        slab = self._host.take(self._rooms[part])
        lane = self._lanes.d2h
        lane.wait_for_compute()
        for storage in storages:
            source, what = storage.bytes_to_copy(), f"{storage.description} to the host"
            for offset, piece in slab.parts(storage.start, storage.start + storage.num_bytes):
                lane.copy(piece, source[offset : offset + piece.numel()], what)
        self._leaving.append(_Group(part, storages, slab, lane.mark()))

    def measure(self, part: Part, storages: Sequence[SavedStorage]) -> None:
        """Note how much room storages of a part take, whether they are copied or not."""
        self._rooms[part] = max(self._rooms.get(part, 0), _lay_out(storages))

    def free(self) -> None:
        """Let the compute lane wait for the copies, and drop what they copied.

        Raises:
            WrittenInPlaceError: Something was written to while it was copied.
            CopyError: A copy has failed.
        """
        for group in self._leaving:
            self._lanes.d2h.hold_compute(group.copied)
            for storage in group.storages:
                storage.free()
        self._away += self._leaving
        self._leaving = []

    def reload(self, parts: Part) -> None:
        """Allocate what is on the host of some parts, and start the copy back.

        Raises:
            CopyError: A copy cannot be started.
        """
        lane = self._lanes.h2d
        for group in [group for group in self._away if group.part in parts]:
            self._away.remove(group)
            targets = [storage.allocate() for storage in group.storages]
            lane.wait_for_compute()
            lane.wait_for(group.copied)
            for storage, target in zip(group.storages, targets, strict=True):
                self._copy_back(storage, target, group.slab)
            group.loaded = lane.mark()
            self._returning.append(group)

    def arrive(self, parts: Part) -> None:
        """Let the compute lane wait for what comes back, and give the host's room back.

        Raises:
            CopyError: A copy has failed.
        """
        for group in [group for group in self._returning if group.part in parts]:
            self._returning.remove(group)
            self._lanes.h2d.hold_compute(group.loaded)
            group.slab.give_back()

    def drop(self) -> None:
        """Give the host's room back, once the compute lane has waited for what is on its way."""
        for group in self._returning:
            self._lanes.h2d.hold_compute(group.loaded)
        for group in [*self._leaving, *self._away]:
            self._lanes.d2h.hold_compute(group.copied)
        for group in [*self._leaving, *self._away, *self._returning]:
            group.slab.give_back()
        self._leaving, self._away, self._returning = [], [], []

    @property
    def num_bytes(self) -> int:
        """Bytes on the host, copies under way included."""
        return _num_bytes([*self._leaving, *self._away, *self._returning])

    @property
    def moving_bytes(self) -> int:
        """Bytes of copies that nobody has waited for yet."""
        return _num_bytes([*self._leaving, *self._returning])

    def _copy_back(self, storage: SavedStorage, target: Tensor, slab: Slab) -> None:
        what = f"{storage.description} from the host"
        for offset, piece in slab.parts(storage.start, storage.start + storage.num_bytes):
            self._lanes.h2d.copy(target[offset : offset + piece.numel()], piece, what)


def _lay_out(storages: Sequence[SavedStorage]) -> int:
    """Give each storage its place in a slab; return the slab's bytes."""
    size = 0
    for storage in storages:
        storage.start = size
        size += -(-storage.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return size


def _num_bytes(groups: list[_Group]) -> int:
    return sum(storage.num_bytes for group in groups for storage in group.storages)

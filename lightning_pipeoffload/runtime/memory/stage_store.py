"""The saved tensors of one stage and microbatch: counted, and copied to the host and back.

``pack`` and ``unpack`` are autograd's saved-tensors hooks. Parameters, inputs of the step and small
tensors are never copied. Other tensors are saved by storage, each storage once; a plan's OFFLOAD,
FREE and RELOAD move the storages.

The input of a deferred linear layer is read by W alone: B gets a stand-in for it, and it may stay
on the host until W.

Copies run on separate lanes. The compute lane allocates and frees every device buffer, after
waiting for the copy that used it; so the allocator needs no ``record_stream``. A copy back waits
for the copy to the host, whether or not the compute lane has waited::

    compute  F  offload  . . .  free  . . .  reload  . . .  arrive  B
    d2h           [ to the host ]
    h2d                                        [ back ]
    device   =========================         ======================
    host          ==========================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_pipeoffload.runtime.device import CopyLanes, Lane, is_on_device
from lightning_pipeoffload.runtime.memory.host_memory import HostMemory, Slab
from lightning_pipeoffload.runtime.memory.saved_tensor import (
    Resident,
    Saved,
    SavedCast,
    SavedShape,
    SavedShard,
    SavedStorage,
    SavedTensor,
    parameter_of_cast,
)
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.runtime.weight_grad import Fetch, WeightInputKeeper
from lightning_pipeoffload.schedule import MemoryPart

_PLAIN = (Tensor, torch.nn.Parameter)  # a subclass may be more than a storage
_ALL = MemoryPart.FOR_B | MemoryPart.FOR_W | MemoryPart.GRADIENT
_ALIGNMENT = 64

HostBytes = dict[MemoryPart, int]
"""The most bytes of the host that each part of a stage's saved tensors has needed so far."""


class HeldBytes(NamedTuple):
    """Saved bytes of one stage and microbatch, or of a rank.

    Attributes:
        device: Bytes on the device, unfinished copies included.
        host: Bytes on the host, unfinished copies included.
        moving: Bytes of copies for which the compute lane has not waited yet.
    """

    device: int = 0
    host: int = 0
    moving: int = 0


@dataclass(frozen=True)
class OffloadSettings:
    """Lanes and memory for the copies of one rank.

    Attributes:
        device: The device of the rank; tensors elsewhere are never copied.
        largest_to_stay: Tensors with at most this many elements are not copied; 1024, as in the
            implementation that came with PipeOffload.
    """

    device: torch.device
    lanes: CopyLanes
    host: HostMemory
    largest_to_stay: int = 1024


def storage_address(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata  # private: a shape's storage has no other address


@dataclass(eq=False)
class _CopyGroup:
    """Storages of one part that are copied to the host and back together.

    ``copied`` and ``loaded`` are the events at the end of these copies.
    """

    part: MemoryPart
    storages: Sequence[SavedStorage]
    slab: Slab
    copied: Any
    loaded: Any = None


class ActivationStore(WeightInputKeeper):
    """The saved tensors of one stage and microbatch.

    Args:
        name: Stage and microbatch, for error messages.
        resident: Addresses of storages that are never offloaded.
        host_bytes: Bytes of each part on the host; shared by the stage's stores, so that the slabs
            of all microbatches have the same size.
        is_measured: Whether the bytes of its parts are measured after each action.
        counts_shapes: Whether shape-only tensors count as if they were on the device.
    """

    def __init__(
        self,
        name: str,
        resident: Collection[int],
        settings: OffloadSettings,
        host_bytes: HostBytes | None = None,
        is_measured: bool = False,
        counts_shapes: bool = False,
    ) -> None:
        self._name = name
        self.is_measured = is_measured
        self._resident = resident
        self._settings = settings
        self._host_bytes = {} if host_bytes is None else host_bytes
        self._counts_shapes = counts_shapes
        self._storages: WeakValueDictionary[int, SavedStorage] = WeakValueDictionary()
        self._num_storages = 0
        self._by_address: WeakValueDictionary[int, SavedStorage] = WeakValueDictionary()
        self._offloading: list[_CopyGroup] = []
        self._on_host: list[_CopyGroup] = []
        self._reloading: list[_CopyGroup] = []

    # Saved tensors

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Store the tensors that autograd saves within the context."""
        with saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: Tensor) -> Saved:
        return self._pack(tensor, MemoryPart.FOR_B)

    @override
    def pack_weight_input(self, x: Tensor) -> Saved:
        return self._pack(x, MemoryPart.FOR_W)

    def keep_until_w(self, tensor: Tensor) -> Fetch:
        """Store an output gradient until W; return a function that returns it to W."""
        return partial(self.unpack, self._pack(tensor, MemoryPart.GRADIENT))

    @override
    def unpack(self, packed: Saved) -> Tensor:
        with self._prefixing_errors():
            return packed.unpack()

    @override
    def unpack_for_b(self, packed: Saved) -> tuple[Tensor, Fetch | None]:
        if isinstance(packed, SavedTensor):
            return packed.stand_in(), partial(self.unpack, packed)
        if isinstance(packed, SavedShape):  # B reads no value of it, nor does W
            return self.unpack(packed), partial(self.unpack, packed)
        return self.unpack(packed), None

    def relabel_for_w(self) -> None:
        """After B, count the tensors that are still in use as needed for W."""
        for storage in self._storages.values():
            if storage.part == MemoryPart.FOR_B:
                storage.part = MemoryPart.GRADIENT

    def saved_bytes(self, parts: MemoryPart = _ALL) -> int:
        """Bytes of some parts, on the device or the host."""
        return sum(s.num_bytes for s in list(self._storages.values()) if s.part in parts)

    @property
    def held(self) -> HeldBytes:
        moving = _num_bytes([*self._offloading, *self._reloading])
        on_device = sum(storage.num_bytes for storage in self._on_device())
        return HeldBytes(on_device, moving + _num_bytes(self._on_host), moving)

    def _pack(self, tensor: Tensor, part: MemoryPart) -> Saved:
        if type(tensor) not in _PLAIN:
            if isinstance(tensor, DTensor):
                return SavedShard(self._pack(tensor._local_tensor, part), tensor)
            if self._counts_shapes and isinstance(tensor, ShapeOnly):
                return SavedShape(self._save_plain(tensor.meta, tensor, part), tensor)
        return self._save_plain(tensor, tensor, part)

    def _save_plain(self, plain: Tensor, tensor: Tensor, part: MemoryPart) -> Saved:
        """Save ``plain``: the tensor itself, or the meta tensor of a shape-only one."""
        if self._is_never_copied(plain):
            return Resident(plain)
        parameter = None if part == MemoryPart.GRADIENT else parameter_of_cast(tensor)
        if parameter is None:
            return self._keep(plain, part)
        return SavedCast(parameter, tensor) if plain is tensor else Resident(plain)

    def _is_never_copied(self, tensor: Tensor) -> bool:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return True
        # A host tensor would be copied by the host, out of the lane's order.
        if not is_on_device(tensor, self._settings.device) and not (
            self._counts_shapes and tensor.is_meta
        ):
            return True
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return True
        storage = tensor.untyped_storage()
        if storage.nbytes() <= self._settings.largest_to_stay * tensor.element_size():
            return True
        return storage_address(tensor) in self._resident

    def _keep(self, tensor: Tensor, part: MemoryPart) -> SavedTensor:
        address = storage_address(tensor)
        storage = self._by_address.get(address)
        if storage is None:
            storage = self._by_address[address] = SavedStorage(tensor, part)
            self._storages[self._num_storages] = storage
            self._num_storages += 1
        if part == MemoryPart.FOR_B:
            storage.part = part
        return SavedTensor(storage, tensor)

    def _on_device(self) -> list[SavedStorage]:
        return [s for s in self._storages.values() if s.device_bytes is not None]

    # Copies

    def start_offload(self) -> None:
        """Start to copy all storages to the host.

        Raises:
            WrittenInPlaceError: A storage was written in place since it was saved.
            HostMemoryError: The host has too little memory.
        """
        with self._prefixing_errors():
            self.measure_host_bytes()
            lane = self._settings.lanes.d2h
            for part, storages in self._by_part():
                slab = self._settings.host.acquire(self._host_bytes[part])
                lane.wait_for_compute()
                for storage in storages:
                    source, what = storage.bytes_to_copy(), f"{storage.description} to the host"
                    _start_copies(lane, storage, source, slab, what, to_host=True)
                self._offloading.append(_CopyGroup(part, storages, slab, lane.record_event()))

    def measure_held_bytes(self) -> HeldBytes:
        """Return the bytes held after an action; measure the parts' host bytes if that is due."""
        if self.is_measured:
            self.measure_host_bytes()
        return self.held

    def measure_host_bytes(self) -> None:
        """Record the host bytes that an offload of each part on the device would need."""
        for part, storages in self._by_part():
            size = 0
            for storage in storages:
                storage.start = size
                size += -(-storage.num_bytes // _ALIGNMENT) * _ALIGNMENT
            self._host_bytes[part] = max(self._host_bytes.get(part, 0), size)

    def free(self) -> None:
        """Make the compute lane wait for the copies to the host, and free the device's memory.

        Raises:
            WrittenInPlaceError: A storage was written in place while it was copied.
            CopyError: A copy has failed.
        """
        with self._prefixing_errors():
            for group in self._offloading:
                self._settings.lanes.d2h.make_compute_wait(group.copied)
                for storage in group.storages:
                    storage.free()
        self._on_host += self._offloading
        self._offloading = []
        self._by_address.clear()  # another storage may get a freed address

    def start_reload(self, parts: MemoryPart) -> None:
        """Allocate device memory for offloaded storages of ``parts``; start to copy them back."""
        lane = self._settings.lanes.h2d
        with self._prefixing_errors():
            for group in [group for group in self._on_host if group.part in parts]:
                self._on_host.remove(group)
                targets = [storage.allocate() for storage in group.storages]
                lane.wait_for_compute()
                lane.wait_for(group.copied)
                for storage, target in zip(group.storages, targets, strict=True):
                    what = f"{storage.description} from the host"
                    _start_copies(lane, storage, target, group.slab, what, to_host=False)
                group.loaded = lane.record_event()
                self._reloading.append(group)

    def wait_for_reload(self, parts: MemoryPart) -> None:
        """Make the compute lane wait for copies back, and return the host memory to the pool."""
        with self._prefixing_errors():
            for group in [group for group in self._reloading if group.part in parts]:
                self._reloading.remove(group)
                self._settings.lanes.h2d.make_compute_wait(group.loaded)
                group.slab.release()

    def release_slabs(self) -> None:
        """Return the host memory once the compute lane has waited; no backward follows."""
        lanes = self._settings.lanes
        with self._prefixing_errors():
            for group in self._reloading:
                lanes.h2d.make_compute_wait(group.loaded)
            for group in [*self._offloading, *self._on_host]:
                lanes.d2h.make_compute_wait(group.copied)
        for group in [*self._offloading, *self._on_host, *self._reloading]:
            group.slab.release()
        self._offloading, self._on_host, self._reloading = [], [], []

    def _by_part(self) -> list[tuple[MemoryPart, list[SavedStorage]]]:
        by_part = [(part, [s for s in self._on_device() if s.part == part]) for part in MemoryPart]
        return [(part, storages) for part, storages in by_part if storages]

    @contextmanager
    def _prefixing_errors(self) -> Iterator[None]:
        """Prefix an error's message with stage and microbatch."""
        try:
            yield
        except RuntimeError as error:
            error.args = (f"{self._name}: {error}",)
            raise


def _start_copies(
    lane: Lane, storage: SavedStorage, on_device: Tensor, slab: Slab, what: str, to_host: bool
) -> None:
    for offset, piece in slab.parts(storage.start, storage.start + storage.num_bytes):
        part = on_device[offset : offset + piece.numel()]
        if to_host:
            lane.copy(piece, part, what)
        else:
            lane.copy(part, piece, what)


def _num_bytes(groups: Iterable[_CopyGroup]) -> int:
    return sum(storage.num_bytes for group in groups for storage in group.storages)

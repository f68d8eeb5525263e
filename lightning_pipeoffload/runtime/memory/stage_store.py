"""What F keeps of one stage and microbatch, and what B leaves for W: counted, and sent to the host.

``pack`` and ``unpack`` are the hooks of autograd's saved tensors. Parameters, inputs of the step
and small tensors stay where they are; of everything else each storage is kept once. A plan's
OFFLOAD, FREE and RELOAD move the storages.

The input of a deferred linear layer is read by W alone: B gets a stand-in for it, and it may stay
on the host until W.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from lightning_pipeoffload.runtime.accelerator import is_on
from lightning_pipeoffload.runtime.memory.host_copies import HostCopies, Rooms
from lightning_pipeoffload.runtime.memory.host_memory import HostMemory
from lightning_pipeoffload.runtime.memory.saved_tensor import (
    Cast,
    Resident,
    Saved,
    SavedStorage,
    SavedTensor,
    cast_parameter,
)
from lightning_pipeoffload.runtime.memory.streams import CopyLanes
from lightning_pipeoffload.runtime.weight_grad.node import Fetch, WeightInputKeeper
from lightning_pipeoffload.schedule.actions import Part

_PLAIN = (Tensor, torch.nn.Parameter)  # a subclass may be more than a storage
_ALL = Part.FOR_B | Part.FOR_W | Part.GRADIENT


@dataclass(frozen=True)
class OffloadSettings:
    """Where activations go.

    Attributes:
        device: The device of the rank; what is elsewhere stays there.
        lanes: The lanes that copies run on.
        host: Memory for what is copied.
        largest_to_stay: The most elements of a tensor that is not worth a copy; 1024, as in the
            implementation that came with PipeOffload.
    """

    device: torch.device
    lanes: CopyLanes
    host: HostMemory
    largest_to_stay: int = 1024


def address_of(tensor: Tensor) -> int:
    """Return what all tensors of one storage have in common."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata  # private: a shape's storage has no other address


class ActivationStore(WeightInputKeeper):
    """One stage's saved tensors of one microbatch.

    Args:
        name: The name of stage and microbatch, for errors.
        resident: Addresses of storages that stay on the device anyway.
        settings: Where activations go.
        rooms: The most bytes that each part of the stage has taken of the host so far.
    """

    def __init__(
        self,
        name: str,
        resident: Collection[int],
        settings: OffloadSettings,
        rooms: Rooms | None = None,
    ) -> None:
        self._name = name
        self._resident = resident
        self._settings = settings
        self._storages: WeakValueDictionary[int, SavedStorage] = WeakValueDictionary()
        self._num_storages = 0
        self._by_address: WeakValueDictionary[int, SavedStorage] = WeakValueDictionary()
        rooms = {} if rooms is None else rooms
        self._copies = HostCopies(settings.lanes, settings.host, rooms)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep what autograd saves inside."""
        with saved_tensors_hooks(self.pack, self.unpack):
            yield

    def pack(self, tensor: Tensor) -> Saved:
        """Keep a tensor that autograd saves."""
        return self._pack(tensor, Part.FOR_B)

    @override
    def pack_weight_input(self, x: Tensor) -> Saved:
        return self._pack(x, Part.FOR_W)

    def pack_for_weight(self, tensor: Tensor) -> Saved:
        """Keep a tensor that waits for W from now on."""
        if self._stays(tensor):
            return Resident(tensor)
        return self._keep(tensor, Part.GRADIENT)

    @override
    def unpack(self, packed: Saved) -> Tensor:
        """Return a kept tensor.

        Raises:
            RuntimeError: The tensor is not on the device, or has been written to.
        """
        with self._named():
            return packed.unpack()

    @override
    def unpack_for_b(self, packed: Saved) -> tuple[Tensor, Fetch | None]:
        if isinstance(packed, SavedTensor):
            return packed.stand_in(), self.fetch(packed)
        return self.unpack(packed), None

    def fetch(self, saved: Saved) -> Fetch:
        """Return what W calls to have a kept tensor."""
        return partial(self.unpack, saved)

    def offload(self) -> None:
        """Start the copy of everything here to the host.

        Raises:
            RuntimeError: Something was written to since it was saved, or the host is full.
        """
        with self._named():
            for part, storages in self._parts_on_device():
                self._copies.offload(part, storages)

    def measure_rooms(self) -> None:
        """Note how much of the host each part takes that may be copied there from now on."""
        for part, storages in self._parts_on_device():
            self._copies.measure(part, storages)

    def free(self) -> None:
        """Let the compute lane wait for the copies, and drop what they copied."""
        with self._named():
            self._copies.free()
        self._by_address.clear()  # what is free may be another storage's address

    def reload(self, parts: Part) -> None:
        """Allocate what is on the host of some parts, and start the copy back."""
        with self._named():
            self._copies.reload(parts)

    def arrive(self, parts: Part) -> None:
        """Let the compute lane wait for what comes back, and give the host's room back."""
        with self._named():
            self._copies.arrive(parts)

    def drop(self) -> None:
        """Keep nothing for a backward that will not come."""
        with self._named():
            self._copies.drop()

    def leave_for_weight(self) -> None:
        """Say that B has run: what B needed and is still here waits for W, as the gradients do."""
        for storage in self._storages.values():
            if storage.part == Part.FOR_B:
                storage.part = Part.GRADIENT

    def saved_bytes(self, parts: Part = _ALL) -> int:
        """Bytes of some parts, wherever they are."""
        return sum(s.num_bytes for s in list(self._storages.values()) if s.part in parts)

    def device_bytes(self) -> int:
        """Bytes on the device, copies under way included."""
        return sum(storage.num_bytes for storage in self._on_device())

    def host_bytes(self) -> int:
        """Bytes on the host, copies under way included."""
        return self._copies.num_bytes

    def moving_bytes(self) -> int:
        """Bytes of copies that nobody has waited for yet."""
        return self._copies.moving_bytes

    def _pack(self, tensor: Tensor, part: Part) -> Saved:
        if self._stays(tensor):
            return Resident(tensor)
        parameter = cast_parameter(tensor)
        return self._keep(tensor, part) if parameter is None else Cast(parameter, tensor)

    def _is_elsewhere(self, tensor: Tensor) -> bool:
        # A tensor of the host would be copied by it, and not behind the lane's other copies.
        return not is_on(tensor, self._settings.device)

    def _stays(self, tensor: Tensor) -> bool:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return True
        if self._is_elsewhere(tensor):
            return True
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return True
        storage = tensor.untyped_storage()
        if storage.nbytes() <= self._settings.largest_to_stay * tensor.element_size():
            return True
        return address_of(tensor) in self._resident

    def _keep(self, tensor: Tensor, part: Part) -> SavedTensor:
        address = address_of(tensor)
        storage = self._by_address.get(address)
        if storage is None:
            storage = self._by_address[address] = SavedStorage(tensor, part)
            self._storages[self._num_storages] = storage
            self._num_storages += 1
        if part == Part.FOR_B:
            storage.part = part
        return SavedTensor(storage, tensor)

    def _on_device(self) -> list[SavedStorage]:
        return [s for s in self._storages.values() if s.device_bytes is not None]

    def _parts_on_device(self) -> Iterator[tuple[Part, list[SavedStorage]]]:
        for part in Part:
            storages = [s for s in self._on_device() if s.part == part]
            if storages:
                yield part, storages

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Say whose tensors an error is about."""
        try:
            yield
        except RuntimeError as error:
            error.args = (f"{self._name}: {error}",)
            raise

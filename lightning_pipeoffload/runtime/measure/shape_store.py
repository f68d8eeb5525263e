"""What stands for the activation stores of all stages while a step runs without values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_pipeoffload.runtime.accelerator import is_on
from lightning_pipeoffload.runtime.memory.host_memory import HostMemory
from lightning_pipeoffload.runtime.memory.saved_tensor import Saved, cast_parameter
from lightning_pipeoffload.runtime.memory.stage_store import ActivationStore, OffloadSettings
from lightning_pipeoffload.runtime.memory.streams import make_lanes
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.weight_grad.node import Fetch, WeightInputKeeper
from lightning_pipeoffload.schedule.actions import Part


class _SavedShape:
    """A saved tensor without a value: its meta tensor is kept as that of a device would be."""

    def __init__(self, saved: Saved, tensor: ShapeOnly) -> None:
        self._saved = saved
        self._place = tensor.device, tensor.origins

    def unpack(self) -> Tensor:
        return ShapeOnly(self._saved.unpack(), *self._place)


class ShapeStore(ActivationStore):
    """An activation store that counts shape-only tensors as the device's own.

    Args:
        name: The name of the stage.
        resident: Addresses of storages that stay on the device anyway.
        device: The device that the tensors seem to be on.
    """

    def __init__(self, name: str, resident: Collection[int], device: torch.device) -> None:
        lanes = make_lanes(torch.device("cpu"), count=1)  # nothing is ever copied
        super().__init__(name, resident, OffloadSettings(device, lanes, HostMemory(pinned=False)))
        self._device = device

    @override
    def _is_elsewhere(self, tensor: Tensor) -> bool:
        return not (tensor.is_meta or is_on(tensor, self._device))

    @override
    def _pack(self, tensor: Tensor, part: Part) -> Saved:
        if not isinstance(tensor, ShapeOnly):
            return super()._pack(tensor, part)
        if self._stays(tensor.meta) or cast_parameter(tensor) is not None:
            return _SavedShape(_Kept(tensor.meta), tensor)
        return _SavedShape(self._keep(tensor.meta, part), tensor)

    @override
    def pack_for_weight(self, tensor: Tensor) -> Saved:
        if not isinstance(tensor, ShapeOnly):
            return super().pack_for_weight(tensor)
        return _SavedShape(super().pack_for_weight(tensor.meta), tensor)


class _Kept:
    """A tensor that takes no memory of its own."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def unpack(self) -> Tensor:
        return self._tensor


class StageStores(WeightInputKeeper):
    """The stores of all stages, of which the one in turn is given what autograd saves.

    Args:
        stores: One store for each stage.

    Attributes:
        stores: These.
        turn: The stage that runs.
    """

    def __init__(self, stores: Sequence[ShapeStore]) -> None:
        self.stores = stores
        self.turn = 0

    @property
    def store(self) -> ShapeStore:
        """The store of the stage in turn."""
        return self.stores[self.turn]

    def pack(self, tensor: Tensor) -> Saved:
        """Keep a tensor that autograd saves."""
        return self.store.pack(tensor)

    @override
    def pack_weight_input(self, x: Tensor) -> Saved:
        return self.store.pack_weight_input(x)

    def pack_for_weight(self, tensor: Tensor) -> Saved:
        """Keep a tensor that waits for W from now on."""
        return self.store.pack_for_weight(tensor)

    @override
    def unpack(self, packed: Any) -> Tensor:
        return self.store.unpack(packed)

    @override
    def unpack_for_b(self, packed: Any) -> tuple[Tensor, Fetch | None]:
        # Only its shape is read, by B as by W.
        return self.unpack(packed), self.fetch(packed)

    def fetch(self, saved: Saved) -> Fetch:
        """Return what W calls to have a kept tensor."""
        return self.store.fetch(saved)

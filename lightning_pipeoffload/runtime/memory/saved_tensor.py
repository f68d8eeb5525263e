"""Objects that replace saved tensors in autograd's graph, with bytes on the device or the host.

Bytes are counted and copied by storage: several saved tensors may be views of one. Autograd holds
the saved tensors, they hold their storages, and nothing else does; so a storage is freed as soon as
the graph has used it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.schedule import MemoryPart

_VIEWS = {
    "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0",
    "ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0", "SplitBackward0",
    "SplitWithSizesBackward0", "UnbindBackward0", "ExpandBackward0", "UnsqueezeBackward0",
    "SqueezeBackward0", "SqueezeBackward1", "AsStridedBackward0", "AliasBackward0",
}  # fmt: skip


class Saved(Protocol):
    """Replaces a saved tensor in autograd's graph."""

    def unpack(self) -> Tensor:
        """Return the tensor on the device.

        Raises:
            WrittenInPlaceError: The tensor was written in place since it was saved.
            RuntimeError: The tensor is on the host.
        """


class WrittenInPlaceError(RuntimeError):
    """A tensor has another value than when autograd saved it."""


class Resident:
    """A tensor that is never copied: a parameter, an input of the step, a small one."""

    def __init__(self, tensor: Tensor) -> None:
        # Detached: an output holds its node, which holds this object.
        self._tensor = tensor.detach()
        self._version = tensor._version

    def unpack(self) -> Tensor:
        _check_unchanged(self._tensor, self._version)
        return self._tensor


class SavedCast:
    """A parameter in another dtype, as under autocast: cast again instead of saved."""

    def __init__(self, parameter: Tensor, cast: Tensor) -> None:
        self._parameter = Resident(parameter)
        self._dtype = cast.dtype
        self._layout = cast.size(), cast.stride(), cast.storage_offset()

    def unpack(self) -> Tensor:
        return self._parameter.unpack().to(self._dtype).as_strided(*self._layout)


class SavedShape:
    """A shape-only tensor, whose meta tensor is saved like a real tensor."""

    def __init__(self, saved: Saved, tensor: ShapeOnly) -> None:
        self._saved = saved
        self._device, self._origins = tensor.device, tensor.origins

    def unpack(self) -> Tensor:
        return ShapeOnly(self._saved.unpack(), self._device, self._origins)


class SavedShard:
    """A DTensor, whose local tensor is saved like any other."""

    def __init__(self, saved: Saved, tensor: DTensor) -> None:
        self._saved = saved
        self._placed = tensor.device_mesh, tensor.placements
        self._shape, self._stride = tensor.shape, tensor.stride()

    def unpack(self) -> Tensor:
        return DTensor.from_local(
            self._saved.unpack(), *self._placed,
            run_check=False, shape=self._shape, stride=self._stride,
        )  # fmt: skip


class SavedStorage:
    """A storage, and the saved tensors that are views of it.

    Attributes:
        part: FOR_B if B needs it; if only W does, FOR_W if F saved it, GRADIENT if B did.
        device_bytes: The storage as bytes; None while it is on the host.
        start: The first byte in the slab that it is copied to.
    """

    def __init__(self, tensor: Tensor, part: MemoryPart) -> None:
        storage = tensor.untyped_storage()
        self.num_bytes = storage.nbytes()
        self.part = part
        self.device = tensor.device
        self.description = f"the tensor {_describe(tensor)}"
        empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.device_bytes: Tensor | None = empty.set_(storage, 0, (self.num_bytes,), (1,))
        self.start = 0
        self._originals: list[tuple[Tensor, int]] = []

    def add_original(self, tensor: Tensor) -> int:
        """Add a tensor of this storage with its version; return its index."""
        self._originals.append((tensor.detach(), tensor._version))
        return len(self._originals) - 1

    def original(self, index: int) -> Tensor | None:
        """Return an added tensor, or raise if it was written; None after an offload."""
        if not self._originals:
            return None
        tensor, version = self._originals[index]
        _check_unchanged(tensor, version)
        return tensor

    def bytes_to_copy(self) -> Tensor:
        """Return the storage as bytes, or raise if it was written since it was saved."""
        self._check_unchanged()
        if self.device_bytes is None:
            raise RuntimeError(f"{self.description} is on the host already")
        return self.device_bytes

    def free(self) -> None:
        """Free the device memory, or raise if it was written since it was saved."""
        self._check_unchanged()
        self._originals.clear()
        self.device_bytes = None

    def allocate(self) -> Tensor:
        """Allocate memory on the device again, for a copy to fill."""
        self.device_bytes = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        return self.device_bytes

    def _check_unchanged(self) -> None:
        for tensor, version in self._originals:
            _check_unchanged(tensor, version)


class SavedTensor:
    """A view of a :class:`SavedStorage`."""

    def __init__(self, storage: SavedStorage, tensor: Tensor) -> None:
        self._storage = storage
        self._dtype = tensor.dtype
        self._layout = tensor.storage_offset(), tensor.size(), tensor.stride()
        self._index = storage.add_original(tensor)

    def unpack(self) -> Tensor:
        original = self._storage.original(self._index)
        if original is not None:
            return original
        if self._storage.device_bytes is None:
            raise RuntimeError(
                f"{self._storage.description} is on the host; the plan needs a RELOAD before this"
            )
        empty = torch.empty(0, dtype=self._dtype, device=self._storage.device)
        return empty.set_(self._storage.device_bytes.untyped_storage(), *self._layout)

    def stand_in(self) -> Tensor:
        return make_stand_in(self._layout[1], self._dtype, self._storage.device)


def make_stand_in(size: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor that takes no memory and has no value."""
    return torch.empty(1, dtype=dtype, device=device).expand(size)


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def parameter_of_cast(tensor: Tensor) -> Tensor | None:
    """Return the parameter of which ``tensor`` is a cast or a view of a cast; None if it is not."""
    node: Any = tensor.grad_fn
    for _ in range(3):
        if node is None or tensor._version:  # private: counts the writes
            return None
        if node.name() == "ToCopyBackward0":
            parameter = getattr(node.next_functions[0][0], "variable", None)
            return parameter if _covers(tensor, parameter) else None
        if node.name() not in _VIEWS:
            return None
        node = node.next_functions[0][0]
    return None


def _covers(tensor: Tensor, parameter: Tensor | None) -> bool:
    """Return whether a cast of all of ``parameter`` fills the storage of ``tensor``."""
    return (
        isinstance(parameter, torch.nn.Parameter)
        and parameter.device == tensor.device
        and tensor.numel() == parameter.numel()
        and tensor.untyped_storage().nbytes() == parameter.numel() * tensor.element_size()
    )


def _check_unchanged(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise WrittenInPlaceError(
            f"the tensor {_describe(tensor)} was written in place after autograd had saved it; "
            f"write to a copy"
        )

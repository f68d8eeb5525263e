"""The user's module during a trace: parameters are shapes, buffers are copies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.shapes import (
    OF_SHARD,
    ShapeOnly,
    quantize_stand_in_if_4bit,
    sharding_of,
    storage_key,
)
from lightning_pipeoffload.runtime.users_code import Slot


class StrippedModule:
    """Replaces a module's tensors, and tells which one a tensor stands for.

    Attributes:
        buffers: The slot of each buffer, its copy, and its own tensor.
        has_shards: Whether tensor ranks share layers of the module.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.buffers: list[tuple[Slot, Tensor, Tensor]] = []
        self._buffer_names: dict[int, str] = {}  # by address
        self._weights: dict[int, str] = {}  # by id of what stands for them
        self._weight_names: dict[int, str] = {}  # by address
        self._names: dict[tuple[int, str], str] = {}  # by module and attribute
        self.has_shards = False

    def strip(self, slots: Iterable[Slot]) -> None:
        """Replace the parameters and buffers; the caller restores them."""
        for slot in slots:
            self._names[id(slot.module), slot.attribute] = slot.name
            if slot.kind == "_buffers" and not isinstance(slot.tensor, ShapeOnly):
                self._copy_buffer(slot, slot.tensor)
                continue
            trains = slot.tensor.requires_grad
            # Each has memory of its own, by which writes are found; remote tensors may share it.
            like = slot.tensor
            meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
            origins = frozenset((slot.name,))
            if sharding_of(like) is not None:  # of a layer that tensor ranks share
                origins, self.has_shards = origins | OF_SHARD, True
            stand_in = ShapeOnly(meta, self._device, origins, trains)
            quantize_stand_in_if_4bit(stand_in, slot)
            slot.put(stand_in)
            if slot.kind == "_parameters":
                stand_in.is_weight = True  # type: ignore[attr-defined]
                self._weights[id(stand_in)] = slot.name
                self._weight_names[storage_key(stand_in)] = slot.name

    def _copy_buffer(self, slot: Slot, value: Tensor) -> None:
        device = torch.device("meta") if value.is_meta else self._device
        copied = value.detach().to(device, copy=True)
        slot.put(copied)
        self.buffers.append((slot, copied, value))
        self._buffer_names[storage_key(copied)] = slot.name

    def buffer_name(self, tensor: Tensor) -> str | None:
        """Return the name of the buffer that shares memory with a tensor; None if none does."""
        return self._buffer_names.get(storage_key(tensor))

    def weight_name(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter that a tensor replaces; None if there is none."""
        return self._weights.get(id(tensor))

    def weight_of_storage(self, memory: int) -> str | None:
        """Return the name of the parameter that has a memory; None if none has."""
        return self._weight_names.get(memory)

    def record_assigned_weight(self, owner: nn.Module, attribute: str, new: Any) -> str | None:
        """Record that a parameter is assigned; return its name if it replaces another one."""
        name = self._names.get((id(owner), attribute))
        if name is not None:
            self._weights[id(new)] = name
        return name

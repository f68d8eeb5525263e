"""The user's module during a trace: parameters are shapes, buffers are copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_pipeoffload.runtime.cut.record import StepRecord, WeightWrite
from lightning_pipeoffload.runtime.cut.value_trace import ValueTrace
from lightning_pipeoffload.runtime.leaves import tensors_in
from lightning_pipeoffload.runtime.shapes.operations import written_arguments
from lightning_pipeoffload.runtime.shapes.quantized_weight import carry_quantization
from lightning_pipeoffload.runtime.shapes.shape_only import (
    ShapeOnly,
    memory_of,
    shape_only_leaves,
)
from lightning_pipeoffload.runtime.shapes.sharding import OF_SHARD, sharding_of
from lightning_pipeoffload.runtime.users_code.attributes import REGISTRIES
from lightning_pipeoffload.runtime.users_code.snapshot import Attribute, is_written
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line


class StrippedModule:
    """Replaces a module's tensors; records which the step writes and which autograd saves."""

    def __init__(
        self, module: nn.Module, device: torch.device, values: ValueTrace, record: StepRecord
    ) -> None:
        self._module = module
        self._device = device
        self._values = values
        self._record = record
        self._buffers: list[tuple[Slot, Tensor, Tensor]] = []
        self._buffer_names: dict[int, str] = {}  # by address
        self._weights: dict[int, str] = {}  # by id of what stands for them
        self._weight_names: dict[int, str] = {}  # by address
        self._saved: set[int] = set()
        self.saved_attributes: set[Attribute] = set()
        self.has_shards = False

    def strip(self, slots: Iterable[Slot]) -> None:
        """Replace the parameters and buffers; the caller restores them."""
        for slot in slots:
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
            carry_quantization(stand_in, slot)
            slot.put(stand_in)
            if slot.kind == "_parameters":
                stand_in.is_weight = True  # type: ignore[attr-defined]
                self._weights[id(stand_in)] = slot.name
                self._weight_names[memory_of(stand_in)] = slot.name

    def _copy_buffer(self, slot: Slot, value: Tensor) -> None:
        device = torch.device("meta") if value.is_meta else self._device
        copied = value.detach().to(device, copy=True)
        slot.put(copied)
        self._buffers.append((slot, copied, value))
        self._buffer_names[memory_of(copied)] = slot.name

    def buffer_name(self, tensor: Tensor) -> str | None:
        """Return the name of the buffer that shares memory with a tensor; None if none does."""
        return self._buffer_names.get(memory_of(tensor))

    def weight_name(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter that a tensor replaces; None if there is none."""
        return self._weights.get(id(tensor))

    def note_weight_writes(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
        """Record an operation's writes into parameters."""
        for written in shape_only_leaves(list(written_arguments(func, args))):
            if memory_of(written) in self._weight_names:
                self._note_write(self._weight_names[memory_of(written)])

    def _note_write(self, name: str, is_new: bool = False) -> None:
        write = WeightWrite(name, self._values.place, calling_line(), is_new)
        self._record.weight_writes.append(write)

    @contextmanager
    def noting_new_weights(self, slots: Iterable[Slot]) -> Iterator[None]:
        """Record each parameter that the step replaces with another one."""
        names = {(id(slot.module), slot.attribute): slot.name for slot in slots}
        plain = nn.Module.register_parameter

        def register(owner: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if (id(owner), name) in names:
                self._note_write(names[id(owner), name], is_new=True)
                self._weights[id(parameter)] = names[id(owner), name]
            plain(owner, name, parameter)

        nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = plain  # type: ignore[method-assign]

    def noting_saved(self) -> AbstractContextManager[None]:
        """Record the tensors that autograd saves within the context.

        The hooks hold only addresses. A graph holds its hooks and their results, and Python's
        collector cannot find a cycle through a graph.
        """
        saved = self._saved

        def note(tensor: Tensor) -> Tensor:
            if isinstance(tensor, ShapeOnly):
                return ShapeOnly(tensor.meta, tensor.device, tensor.origins)
            saved.add(memory_of(tensor))
            return tensor.detach()

        return saved_tensors_hooks(note, lambda packed: packed)

    def find_saved_attributes(self) -> None:
        """Collect the attributes, other than buffers, with tensors that autograd has saved."""
        for part in self._module.modules():
            for name in vars(part).keys() - REGISTRIES:
                tensors = tensors_in(vars(part)[name])
                if any(memory_of(tensor) in self._saved for tensor in tensors):
                    self.saved_attributes.add(Attribute(part, name))

    def find_written(self) -> None:
        """Record the buffers that the step has written, and the origins of the values."""
        record = self._record
        written = [
            slot
            for slot, tensor, value in self._buffers
            if slot.tensor is not tensor or is_written(tensor, value)
        ]
        for slot in written:
            if isinstance(slot.tensor, ShapeOnly) and hasattr(slot.tensor, "source"):
                record.segments[slot.name].add(slot.tensor.source.position)
        common = [slot for slot in written if not record.segments.get(slot.name)]
        record.written = {slot.name for slot in common}
        record.written_in_place = {Attribute(slot.module, slot.attribute) for slot in common}
        record.saved_and_written = {
            Attribute(slot.module, slot.attribute)
            for slot, tensor, value in self._buffers
            if memory_of(tensor) in self._saved
            and (record.segments.get(slot.name) or is_written(tensor, value))
        }

"""Keeps less for the backward: what is cheap to compute again is not saved.

What autograd saves passes :class:`CheapRecompute`, which gives each tensor either to the hooks
around it (those of an offload, say), or puts a recipe in its place where that takes less memory:
the output of a layer norm, whose input is saved anyway, but not that of a ReLU, whose input nobody
else needs.

What only W reads, the input of a linear layer, is computed at W and not at B, for which the
neighbour waits; unless B computes it on the way to something else, or keeping what it comes from
until W would take more memory than the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import override

from lightning_pipeoffload.runtime.memory.call_recorder import CallRecorder
from lightning_pipeoffload.runtime.memory.cheap_calls import ValueSource
from lightning_pipeoffload.runtime.memory.saved_tensor import cast_parameter, make_stand_in
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly, storage_of
from lightning_pipeoffload.runtime.weight_grad.node import (
    Fetch,
    Hooks,
    WeightInputKeeper,
    keeper_of,
    saving_hooks,
)

RECOMPUTE = ("none", "cheap", "full")
_FOLLOWED = (Tensor, ShapeOnly)
SMALLEST_NUMEL = 1024
"""Tensors with fewer elements are kept."""
_SMALLEST_SHARE = 1 / 8
"""Of what computing a tensor reads; a smaller one, such as a norm's mean, is kept."""


@dataclass
class _Kept:
    """What the hooks around keep of a tensor, and its version then."""

    handle: Any
    version: int


@dataclass
class _Recipe:
    """How to compute a tensor that is left out: it is a view of what ``source`` computes.

    Attributes:
        source: The source of a value.
        value_offset: First element of the value in its storage, when F ran.
        size: The size of the tensor.
        stride: The stride of the tensor, in elements.
        offset: First element of the tensor in that storage.
        dtype: The dtype of the tensor.
        device: The device of the tensor.
        for_w: Whether W alone needs it.
    """

    source: ValueSource
    value_offset: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    for_w: bool


class SurroundingHooks:
    """A :class:`.cheap_calls.Store`: the saved-tensors hooks in force where it is made, if any."""

    def __init__(self) -> None:
        hooks: Hooks = saving_hooks() or (_same, _same)
        self._pack, self._unpack = hooks
        keeper = self._keeper = keeper_of(hooks)
        self._pack_weight_input = self._pack if keeper is None else keeper.pack_weight_input

    def pack(self, tensor: Tensor, is_weight_input: bool = False) -> _Kept:
        """Keep a tensor; beside autograd, for a node that held its own output would never go."""
        is_in_graph = type(tensor) in _FOLLOWED and tensor.requires_grad
        # The hooks tell by its node that a cast parameter need not be kept.
        detaches = is_in_graph and cast_parameter(tensor) is None
        kept = tensor.detach() if detaches else tensor
        pack = self._pack_weight_input if is_weight_input else self._pack
        return _Kept(pack(kept), tensor._version)

    def unpack(self, handle: _Kept) -> Tensor:
        """Return it.

        Raises:
            RuntimeError: The source was written in place meanwhile.
        """
        tensor = self._unpack(handle.handle)
        if tensor is handle.handle and tensor._version != handle.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that the backward needs was written in "
                f"place after its use (version {tensor._version}, needed {handle.version}); write "
                f'a copy of it, or use recompute="none" if it works so'
            )
        return tensor

    def unpack_for_b(self, handle: _Kept) -> tuple[Tensor, Fetch | None]:
        """Return what was packed as an input of a deferred operation, or a stand-in."""
        if self._keeper is None:
            return self.unpack(handle), None
        return self._keeper.unpack_for_b(handle.handle)


class CheapRecompute(WeightInputKeeper):
    """What one stage's F of one microbatch saves.

    Args:
        kinds: The types of the tensors that may be computed again.
    """

    def __init__(self, kinds: tuple[type[Tensor], ...] = (Tensor,)) -> None:
        self._store = SurroundingHooks()
        self._kinds = kinds
        self._recorder = CallRecorder(kinds)
        self._kept: dict[int, StorageWeakRef] = {}

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Decide about what autograd saves inside."""
        try:
            with saved_tensors_hooks(self._pack, self.unpack), self._recorder:
                yield
        finally:
            self.end_stage()

    def end_stage(self) -> None:
        """Forget what this stage has computed and keeps."""
        self._recorder.forget()
        self._kept.clear()

    def pack(self, tensor: Tensor) -> _Kept:
        """Keep a tensor that a recipe needs: as for B, whose tensors are there in W too."""
        return self._keep(tensor, is_weight_input=False)

    @override
    def pack_weight_input(self, x: Tensor) -> _Kept | _Recipe:
        return self._pack(x, is_weight_input=True)

    @override
    def unpack(self, packed: _Kept | _Recipe) -> Tensor:
        return self._store.unpack(packed) if isinstance(packed, _Kept) else self._value(packed)

    @override
    def unpack_for_b(self, packed: _Kept | _Recipe) -> tuple[Tensor, Fetch | None]:
        if isinstance(packed, _Kept):
            return self._store.unpack_for_b(packed)
        if not packed.for_w:
            return self._value(packed), None
        stand_in = make_stand_in(packed.size, packed.dtype, packed.device)
        return stand_in, partial(self._value, packed)

    def _keep(self, tensor: Tensor, is_weight_input: bool) -> _Kept:
        self._note(tensor)
        return self._store.pack(tensor, is_weight_input)

    def _pack(self, tensor: Tensor, is_weight_input: bool = False) -> _Kept | _Recipe:
        if type(tensor) not in self._kinds:
            return self._store.pack(tensor, is_weight_input)
        found = self._recorder.find(tensor) if tensor.numel() >= SMALLEST_NUMEL else None
        if found is None:
            return self._keep(tensor, is_weight_input)
        source, (size, stride, offset, dtype) = found
        if tensor.dtype == dtype and self._is_worth_it(source, tensor):
            return self._leave_out(source, offset, tensor, is_weight_input)
        kept = self._keep(tensor, is_weight_input)
        same = (tensor.shape, tensor.stride(), tensor.storage_offset()) == (size, stride, offset)
        # What is kept for W alone may be elsewhere when B has to compute something from it.
        if same and not is_weight_input:
            source.kept_as(kept, tensor.nbytes)
        return kept

    def _leave_out(
        self, source: ValueSource, value_offset: int, tensor: Tensor, is_weight_input: bool
    ) -> _Recipe:
        for_w = is_weight_input and not source.is_needed_in_b and source.bytes_read <= tensor.nbytes
        source.claim(self, for_w)
        layout = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _Recipe(source, value_offset, *layout, tensor.dtype, tensor.device, for_w)

    def _value(self, packed: _Recipe) -> Tensor:
        value = packed.source.value(self, packed.for_w)
        offset = packed.offset - packed.value_offset + value.storage_offset()
        return value.as_strided(packed.size, packed.stride, offset)

    def _is_worth_it(self, source: ValueSource, tensor: Tensor) -> bool:
        if source.call is None or not source.is_intact():
            return False
        if tensor.nbytes < _SMALLEST_SHARE * source.bytes_read:
            return False
        needed = {id(leaf): leaf for leaf in source.leaves() if not self._is_kept(leaf)}
        return sum(leaf.nbytes for leaf in needed.values()) < tensor.nbytes

    def _is_kept(self, tensor: Tensor) -> bool:
        if isinstance(tensor, nn.Parameter):
            return True
        kept = self._kept.get(storage_of(tensor)._cdata)
        return kept is not None and not kept.expired()

    def _note(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        self._kept[storage._cdata] = StorageWeakRef(storage)


def check_recompute(recompute: str) -> None:
    """Check the argument.

    Raises:
        ValueError: The value is none of :data:`RECOMPUTE`.
    """
    if recompute not in RECOMPUTE:
        raise ValueError(
            f'recompute must be "none", "cheap" (norms, activations, dropout) or "full" (whole '
            f"blocks), not {recompute!r}"
        )


def _same(value: Any) -> Any:
    return value

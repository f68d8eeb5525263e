"""Recomputation of cheap values: the backward recomputes them instead of reading saved ones.

:class:`CheapRecompute` gets every tensor that autograd saves. It passes the tensor on to the
surrounding hooks (such as those of an offload), or replaces it with a recipe if that saves memory:
for the output of a layer norm, whose input is saved anyway, but not for the output of a ReLU, whose
input nothing else needs.

The input of a linear layer, which only W reads, is recomputed in W, since the next rank waits for
B. It is recomputed in B if B needs it anyway, or if the tensors that it is computed from take more
memory until W than the value itself.
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

from lightning_pipeoffload.runtime.memory.cheap_calls import CallRecorder, ValueSource
from lightning_pipeoffload.runtime.memory.saved_tensor import make_stand_in, parameter_of_cast
from lightning_pipeoffload.runtime.shapes import ShapeOnly, storage_of
from lightning_pipeoffload.runtime.weight_grad import (
    Fetch,
    Hooks,
    WeightInputKeeper,
    keeper_of,
    saving_hooks,
)

_FOLLOWED = (Tensor, ShapeOnly)
SMALLEST_NUMEL = 1024
"""Tensors with fewer elements are saved."""
_SMALLEST_SHARE = 1 / 8
"""Of the bytes that computing a tensor reads; a smaller one, such as a norm's mean, is saved."""


@dataclass
class _SavedHandle:
    """A tensor saved by the surrounding hooks, and its version at that time."""

    handle: Any
    version: int


@dataclass
class _RecomputedTensor:
    """A tensor to recompute: a view with this layout of the value of ``source``.

    Attributes:
        value_offset: The storage offset of the value in F.
        offset: The storage offset of the tensor in F.
        for_w: Whether only W needs it.
    """

    source: ValueSource
    value_offset: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    for_w: bool


class CheapRecompute(WeightInputKeeper):
    """Saves or recomputes the tensors of a stage's F of one microbatch.

    Args:
        kinds: The types of the tensors that may be recomputed.
    """

    def __init__(self, kinds: tuple[type[Tensor], ...] = (Tensor,)) -> None:
        # Not NO_HOOKS: the recorder would see each detach(), and _save_with_outer_hooks() has done
        # it.
        hooks: Hooks = saving_hooks() or (_identity, _identity)
        self._pack_around, self._unpack_around = hooks
        keeper = self._keeper_around = keeper_of(hooks)
        self._pack_input_around = self._pack_around if keeper is None else keeper.pack_weight_input
        self._kinds = kinds
        self._recorder = CallRecorder(kinds)
        self._kept: dict[int, StorageWeakRef] = {}
        self._kept_of: dict[int, dict[int, StorageWeakRef]] = {}

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save or recompute the tensors that autograd saves within the context."""
        try:
            with saved_tensors_hooks(self._save_or_make_recipe, self.unpack), self._recorder:
                yield
        finally:
            self._recorder.forget()
            self._kept.clear()
            self._kept_of.clear()

    def change_stage(self, last: int, stage: int) -> None:
        """Continue with another stage's recorded calls and saved tensors."""
        self._recorder.change_stage(last, stage)
        self._kept_of[last] = self._kept
        self._kept = self._kept_of.pop(stage, {})

    def pack(self, tensor: Tensor) -> _SavedHandle:
        """Save a tensor that a recipe needs."""
        return self._keep(tensor, is_weight_input=False)

    @override
    def pack_weight_input(self, x: Tensor) -> _SavedHandle | _RecomputedTensor:
        return self._save_or_make_recipe(x, is_weight_input=True)

    @override
    def unpack(self, packed: _SavedHandle | _RecomputedTensor) -> Tensor:
        if isinstance(packed, _RecomputedTensor):
            return self._recomputed_value(packed)
        tensor = self._unpack_around(packed.handle)
        if tensor is packed.handle and tensor._version != packed.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that the backward needs was written in "
                f"place after its use (version {tensor._version}, needed {packed.version}); write "
                f'a copy of it, or use recompute="none" if it works so'
            )
        return tensor

    @override
    def unpack_for_b(self, packed: _SavedHandle | _RecomputedTensor) -> tuple[Tensor, Fetch | None]:
        if isinstance(packed, _RecomputedTensor) and packed.for_w:
            stand_in = make_stand_in(packed.size, packed.dtype, packed.device)
            return stand_in, partial(self._recomputed_value, packed)
        if isinstance(packed, _RecomputedTensor) or self._keeper_around is None:
            return self.unpack(packed), None
        return self._keeper_around.unpack_for_b(packed.handle)

    def _save_or_make_recipe(
        self, tensor: Tensor, is_weight_input: bool = False
    ) -> _SavedHandle | _RecomputedTensor:
        if type(tensor) not in self._kinds:
            return self._save_with_outer_hooks(tensor, is_weight_input)
        origin = self._recorder.find_source(tensor) if tensor.numel() >= SMALLEST_NUMEL else None
        if origin is None:
            return self._keep(tensor, is_weight_input)
        source, (size, stride, offset, dtype) = origin
        if tensor.dtype == dtype and self._is_worth_it(source, tensor):
            return self._make_recipe(source, offset, tensor, is_weight_input)
        kept = self._keep(tensor, is_weight_input)
        same = (tensor.shape, tensor.stride(), tensor.storage_offset()) == (size, stride, offset)
        # A tensor that only W reads may be on the host when B has to compute from it.
        if same and not is_weight_input:
            source.set_saved_handle(kept, tensor.nbytes)
        return kept

    def _make_recipe(
        self, source: ValueSource, value_offset: int, tensor: Tensor, is_weight_input: bool
    ) -> _RecomputedTensor:
        for_w = (
            is_weight_input and not source.is_recomputed_in_b and source.bytes_read <= tensor.nbytes
        )
        source.register_use(self, for_w)
        layout = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _RecomputedTensor(source, value_offset, *layout, tensor.dtype, tensor.device, for_w)

    def _recomputed_value(self, packed: _RecomputedTensor) -> Tensor:
        value = packed.source.value(self, packed.for_w)
        offset = packed.offset - packed.value_offset + value.storage_offset()
        return value.as_strided(packed.size, packed.stride, offset)

    def _is_worth_it(self, source: ValueSource, tensor: Tensor) -> bool:
        if source.call is None or not source.is_intact():
            return False
        if tensor.nbytes < _SMALLEST_SHARE * source.bytes_read:
            return False
        needed = {id(leaf): leaf for leaf in source.tensors_to_save() if not self._is_kept(leaf)}
        return sum(leaf.nbytes for leaf in needed.values()) < tensor.nbytes

    def _is_kept(self, tensor: Tensor) -> bool:
        if isinstance(tensor, nn.Parameter):
            return True
        kept = self._kept.get(storage_of(tensor)._cdata)
        return kept is not None and not kept.expired()

    def _keep(self, tensor: Tensor, is_weight_input: bool) -> _SavedHandle:
        storage = storage_of(tensor)
        self._kept[storage._cdata] = StorageWeakRef(storage)
        return self._save_with_outer_hooks(tensor, is_weight_input)

    def _save_with_outer_hooks(self, tensor: Tensor, is_weight_input: bool) -> _SavedHandle:
        """Save a tensor with the enclosing saved-tensors hooks, detached from its graph."""
        # A node that holds its own output is never freed.
        is_in_graph = type(tensor) in _FOLLOWED and tensor.requires_grad
        # The hooks recognize a cast parameter, which need not be saved, by its node.
        detaches = is_in_graph and parameter_of_cast(tensor) is None
        pack = self._pack_input_around if is_weight_input else self._pack_around
        return _SavedHandle(pack(tensor.detach() if detaches else tensor), tensor._version)


def check_recompute(recompute: str) -> None:
    if recompute not in ("none", "cheap", "full"):
        raise ValueError(
            f'recompute must be "none", "cheap" (norms, activations, dropout) or "full" (whole '
            f"blocks), not {recompute!r}"
        )


def _identity(value: Any) -> Any:
    return value

"""Attention of a slice of a sequence: to itself, and to the keys and values of earlier slices.

A kernel at the dispatcher's autograd key takes the place of torch's attention while a block runs on
a slice, also where torch calls it itself, as in ``nn.MultiheadAttention``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.backends.cuda import (
    SDPAParams,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

from lightning_pipeoffload.runtime import ACTIVE_SETTINGS
from lightning_pipeoffload.runtime.sequence.slices import EarlierSlices, SequenceSlice
from lightning_pipeoffload.runtime.shapes import storage_key
from lightning_pipeoffload.runtime.weight_grad import (
    NO_HOOKS,
    Original,
    registered_kernel,
    saving_hooks,
)

_INSTEAD = (
    "; slices attend by scaled_dot_product_attention with is_causal=True, or with a mask of "
    'queries and keys that the block gets as an argument (attn_implementation="sdpa" of '
    "transformers): use that, or num_sequence_slices=1"
)


class BlockOnSlice:
    """One call of a block on a slice.

    Args:
        block: The block's name.
        call: The number of the block's call, the same for all slices.
        part: The slice.
        earlier: The tensors that earlier slices of the microbatch have kept.
        has_dropout: Whether attention applies the block's dropout.
    """

    def __init__(
        self,
        block: str,
        call: int,
        part: SequenceSlice,
        earlier: EarlierSlices,
        has_dropout: bool = True,
    ) -> None:
        self._block, self._call = block, call
        self._has_dropout = has_dropout
        self.part, self._earlier = part, earlier
        self._num_attentions = 0
        self._around: Any = None
        self._has_run = False

    def run(self, block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the block; in a backward again, for ``recompute="full"``."""
        self._num_attentions, self._around = 0, _checkpoint_state()
        try:
            with ACTIVE_SETTINGS.during(self):
                output = block(*args, **kwargs)
        finally:
            self._around = None  # a checkpoint's hooks hold this object
        if (self._call, self._num_attentions) in self._earlier.keys_and_values:
            self._refuse_skipped_attention()
        self._has_run = True
        return output

    def attend(
        self,
        plain: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        options: dict[str, Any],
    ) -> Tensor:
        """Attend to the keys and values of this slice and of earlier ones."""
        self._check_attention(query, key, mask, is_causal)
        part = self.part
        slices = self._earlier.keys_and_values[self._call, self._num_attentions]
        self._num_attentions += 1
        if not self._has_run:  # in a backward no later slice comes
            if len(slices) != part.index:
                self._refuse_skipped_attention()
            slices.append(
                (
                    self._earlier.make_shared_leaf(part, key),
                    self._earlier.make_shared_leaf(part, value),
                )
            )
        keys, values = zip(*slices[: part.index], (key, value), strict=True)
        if not self._has_dropout:
            options["dropout_p"] = 0.0
        with _JoinedTensors() as joined:
            key, value = joined.join(keys), joined.join(values)
            if is_causal and part.index:
                return _attend_lower_right(plain, query, key, value, options)
            return plain(query, key, value, mask, is_causal=is_causal, **options)

    def _refuse_skipped_attention(self) -> NoReturn:
        raise ValueError(
            f"{self._block} calls attention on some slices of a sequence only, since what it "
            f"decides by values or random numbers (LayerDrop) is decided for each slice; decide "
            f"it before the blocks, or use num_sequence_slices=1"
        )

    def _check_attention(
        self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool
    ) -> None:
        size, reason = self.part.stop - self.part.start, ""
        if _checkpoint_state() != self._around:
            raise ValueError(
                f"{self._block} is checkpointed inside (gradient_checkpointing of transformers, or "
                f"torch.utils.checkpoint), and its attention would not find the slice again; leave "
                f'that out, and use recompute="full"'
            )
        if query.shape[-2] != size or key.shape[-2] != size:
            reason = (
                f"has {query.shape[-2]} queries and {key.shape[-2]} keys in a slice of {size} "
                f"tokens (of a cache of keys? set use_cache=False)"
            )
        elif mask is None and not is_causal:
            reason = "attends to later tokens"
        elif mask is not None and mask.shape[-1] != self.part.stop:
            reason = f"has a mask of {mask.shape[-1]} keys, and {self.part.stop} keys until there"
        if reason:
            raise ValueError(
                f"the sequences of {self._block} cannot be cut into slices: its attention "
                f"{reason}{_INSTEAD}"
            )


class _JoinedTensors:
    """Saves joined keys and values as the slices' own, to be joined again in the backward.

    Later slices keep these anyway. They stay on the device: the surrounding saved-tensors hooks,
    such as an offload's, do not get them or tensors that share their memory.
    """

    def __init__(self) -> None:
        self._joined: dict[tuple[int, int], tuple[Tensor, list[Tensor]]] = {}  # by address
        self._kept: set[int] = set()
        self._pack_around, self._unpack_around = saving_hooks() or NO_HOOKS

    def join(self, slices: Sequence[Tensor]) -> Tensor:
        """Return the slices' keys or values as one tensor."""
        joined = slices[0] if len(slices) == 1 else torch.cat([*slices], -2)
        self._joined[_address_of(joined)] = joined, [part.detach() for part in slices]
        self._kept.update(map(storage_key, slices))
        return joined

    def __enter__(self) -> _JoinedTensors:
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        del self._hooks  # they hold this object
        self._joined.clear()  # the graph holds it too

    def _pack(self, tensor: Tensor) -> Any:
        joined, slices = self._joined.get(_address_of(tensor), (None, []))
        if joined is None or joined.shape != tensor.shape or joined.stride() != tensor.stride():
            # In one tensor with its keys, say.
            is_kept = storage_key(tensor) in self._kept
            return _Slices([tensor.detach()]) if is_kept else self._pack_around(tensor)
        return _Slices(slices)

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, _Slices):
            return self._unpack_around(packed)
        return packed.tensors[0] if len(packed.tensors) == 1 else torch.cat(packed.tensors, -2)


def _address_of(tensor: Tensor) -> tuple[int, int]:
    return storage_key(tensor), int(tensor.storage_offset())


class _Slices(NamedTuple):
    tensors: list[Tensor]


def _checkpoint_state() -> Any:
    """Return the state that a checkpoint changes: saved-tensors hooks, or grad mode."""
    hooks = saving_hooks()
    return hooks and hooks[0], torch.is_grad_enabled()


def _attend_lower_right(
    plain: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Attend causally, with the last query aligned with the last key."""
    queries, keys = query.shape[-2], key.shape[-2]
    if query.device.type != "cpu":
        of_kernels = options["dropout_p"], False, options.get("enable_gqa", False)
        parameters = SDPAParams(query, key, value, None, *of_kernels)
        if can_use_flash_attention(parameters) or can_use_efficient_attention(parameters):
            bias: Any = _LowerRight(CausalVariant.LOWER_RIGHT, queries, keys)
            # Private: what F.scaled_dot_product_attention() does with a causal_lower_right().
            return CausalBias._dispatch(query, key, value, bias, **options)
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device)
    return plain(query, key, value, mask.tril(keys - queries), is_causal=False, **options)


class _LowerRight(NamedTuple):
    """The attributes of a CausalBias; as a tensor it cannot be made under a dispatch mode."""

    variant: CausalVariant
    seq_len_q: int
    seq_len_kv: int


def _make_attention_kernel(original: Original) -> Callable[..., Tensor]:
    def kernel(
        keys: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        def plain(*args: Any, **kwargs: Any) -> Tensor:
            return original(keys, *args, **kwargs)

        running = ACTIVE_SETTINGS.latest(BlockOnSlice)
        options["dropout_p"] = dropout_p
        if running is None:
            return plain(query, key, value, attn_mask, is_causal=is_causal, **options)
        return running.attend(plain, query, key, value, attn_mask, is_causal, options)

    return kernel


def attending_to_slices(device_type: str) -> AbstractContextManager[None]:
    """Make blocks on slices attend to earlier slices, on one type of device.

    It costs 2 to 4 us a call.
    """
    call = functional.scaled_dot_product_attention
    return registered_kernel(
        "scaled_dot_product_attention", _make_attention_kernel, call, device_type
    )

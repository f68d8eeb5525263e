"""Loads 4-bit weights of bitsandbytes: quantizes full weights, or loads packed ones.

A tensor is read, quantized and dropped before the next one. In a folder that was saved quantized,
each packed weight has entries of its quantization state (``q_proj.weight.absmax``, ...).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime import value_of
from lightning_pipeoffload.runtime.shapes import (
    ShapeOnly,
    params4bit_arguments,
    read_shape_only_quant_state,
    read_state,
    unpacked_shape,
)
from lightning_pipeoffload.runtime.users_code import Slot

_ENTRY = re.compile(
    r"(.+)\.(?:(?:nested_)?(?:absmax|quant_map)|quant_state\.bitsandbytes__(?:nf4|fp4))"
)
Entries = dict[str, Tensor]


def pop_quant_states(weights: dict[str, Tensor]) -> dict[str, Entries]:
    """Remove the quantization states of 4-bit weights from a dict; return them by weight."""
    entries: dict[str, Entries] = {}
    for key in list(weights):
        entry = _ENTRY.fullmatch(key)
        if entry and entry[1] in weights:
            entries.setdefault(entry[1], {})[key] = weights.pop(key)
    return entries


def _shape_in(entries: Entries) -> tuple[int, ...]:
    """Return the full shape of a packed weight from its entries."""
    from bitsandbytes.utils import unpack_tensor_to_dict  # noqa: PLC0415 - the module has 4 bits

    packed = next((value for key, value in entries.items() if ".quant_state." in key), None)
    return () if packed is None else (*unpack_tensor_to_dict(value_of(packed))["shape"],)


def describe_shape_mismatch(slot: Slot, stored: Tensor, entries: Entries) -> str:
    """Describe how a stored weight's shape differs from a 4-bit weight's; "" if it does not."""
    there = _shape_in(entries) if entries else (*_transposed_for_conv1d(slot, stored).shape,)
    here = (*unpacked_shape(slot.tensor),)
    return "" if there == here else f"of shape {there} in the files and of {here} here"


def load_4bit(
    slots: Sequence[Slot], stored: Tensor, entries: Entries, device: torch.device
) -> None:
    """Fill a 4-bit weight under all its names; a remote weight gets shapes only.

    Args:
        slots: The slots of the weight.
        stored: The tensor in the files: values to quantize, or a packed weight.
        entries: The quantization state of a packed weight.
        device: The device on which a weight on the meta device gets memory.
    """
    weight: Any = slots[0].tensor
    if weight.is_meta:
        if device.type == "meta":
            return
        weight = _materialize(weight, device)
    state = None
    if entries:
        if isinstance(weight, ShapeOnly):
            state = read_shape_only_quant_state(entries, weight)
        else:
            state = read_state(entries, weight.device)
        value = _read_or_shape(weight, stored, stored.dtype)
        weight.blocksize, weight.compress_statistics = state.blocksize, state.nested
        weight.quant_type, weight.quant_storage = state.quant_type, stored.dtype
    else:
        value = _read_or_shape(
            weight, _transposed_for_conv1d(slots[0], stored), _dtype_in_full(weight, stored)
        )
    weight.data, weight.quant_state, weight.bnb_quantized = value, state, bool(entries)
    if not entries:
        weight.to(weight.device)  # quantizes, in place
    for slot in slots:
        slot.put(weight)
        slot.module.quant_state = weight.quant_state


def _materialize(weight: Any, device: torch.device) -> Any:
    if isinstance(weight, ShapeOnly):
        return weight.on_device(device)  # type: ignore[attr-defined]
    empty = torch.empty(0, dtype=weight.dtype, device=device)
    return type(weight)(empty, requires_grad=False, **params4bit_arguments(weight))


def _dtype_in_full(weight: Any, stored: Tensor) -> torch.dtype:
    if weight.bnb_quantized:
        dtype: torch.dtype = weight.quant_state.dtype
        return dtype
    return weight.dtype if weight.is_floating_point() else stored.dtype


def _transposed_for_conv1d(slot: Slot, stored: Tensor) -> Tensor:
    """Return a weight as its layer has it; transformers replaces layers that have it transposed."""
    source = getattr(slot.module, "source_cls", None)
    return stored.T if getattr(source, "__name__", "") == "Conv1D" else stored


def _read_or_shape(weight: Tensor, stored: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(weight, ShapeOnly):
        meta = torch.empty(stored.shape, dtype=dtype, device="meta")
        return ShapeOnly(meta, weight.device, weight.origins)
    return value_of(stored).to(weight.device, dtype)

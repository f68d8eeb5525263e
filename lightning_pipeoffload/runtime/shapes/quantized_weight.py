"""4-bit weights of bitsandbytes, with values or without.

bitsandbytes packs two values of a weight into a byte. ``quant_state``, an attribute of the weight
and of its layer, holds the scale of each block of values (``absmax``), which may be quantized too,
and how to decode both. A layer's weight is unquantized until ``layer.to(device)``. A shape
of a remote weight has the packed shape, and such a state made of shapes.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pipeoffload.runtime import ACTIVE_SETTINGS, value_of
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.step_rules import StepRules
from lightning_pipeoffload.runtime.users_code import Slot

SHARDED = (
    "and with tensor_parallel_size=1 each rank of a pipeline has its layers whole: set it for "
    'parallelize_module over self.device_mesh["tensor_parallel"], leave fully_shard out, or use '
    "Lightning's ModelParallelStrategy without a pipeline"
)
# Attributes of Params4bit that are also its arguments.
_OPTIONS = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized")


def is_4bit(tensor: Tensor) -> bool:
    """Whether a tensor is the weight of a 4-bit layer, quantized or not yet."""
    return hasattr(tensor, "bnb_quantized")


def state_of(slot: Slot) -> Any:
    """Return the quantization state of the weight in a slot; None if it has none."""
    state = getattr(slot.tensor, "quant_state", None)
    if state is None and slot.attribute == "weight":
        return getattr(slot.module, "quant_state", None)  # as the layer looks for it
    return state


def params4bit_arguments(weight: Any) -> dict[str, Any]:
    """Return the arguments with which ``Params4bit`` makes a weight like this one."""
    names = (*_OPTIONS, "quant_state", "module")
    return {name: getattr(weight, name) for name in names if hasattr(weight, name)}


def carry_options(shape: Any, weight: Any) -> None:
    """Copy the attributes of a 4-bit weight to its shape."""
    for name, value in params4bit_arguments(weight).items():
        setattr(shape, name, value)
    state = getattr(weight, "quant_state", None)
    shape.quant_state = None if state is None else shape_only_quant_state(state, shape)


def quantize_stand_in_if_4bit(stand_in: ShapeOnly, slot: Slot) -> None:
    """Give ``stand_in`` the packed shape of a slot's 4-bit weight, and a shape-only state.

    An unquantized weight gets the packed shape and state that it will have on a device.

    Raises:
        ValueError: The weight is packed without a state, has 8 bits, or consists of several
            tensors.
    """
    weight, state = slot.tensor, state_of(slot)
    if state is not None:
        stand_in.quant_state = shape_only_quant_state(state, stand_in)  # type: ignore[attr-defined]
    elif is_4bit(weight):
        _refuse_packed(slot)
        quantize_shape(stand_in, weight)
    else:
        refuse_other_quantized(slot.name, weight)


def refuse_dtensor_weight(name: str, weight: Tensor) -> None:
    """Raise ``ValueError`` for a DTensor where layers are not shared."""
    if isinstance(weight, DTensor):
        raise ValueError(f"{name} is a DTensor, a shard of a weight, {SHARDED}")


def refuse_other_quantized(name: str, weight: Tensor) -> None:
    """Raise ``ValueError`` for an 8-bit weight, and for one that consists of several tensors."""
    refuse_dtensor_weight(name, weight)
    if hasattr(weight, "SCB"):
        raise ValueError(
            f"{name} is an 8-bit weight of bitsandbytes, whose layer chooses what to quantize "
            f"by the values of its input; use 4 bits (Linear4bit, load_in_4bit=True)"
        )
    if hasattr(weight, "__tensor_flatten__") and not isinstance(weight, ShapeOnly):  # torchao's
        raise ValueError(
            f"{name} is a {type(weight).__name__}, a tensor made of several, which cannot be on "
            f"some ranks and without values on others; leave enable_fsdp_float8_all_gather out for "
            f"float8, or use bitsandbytes' 4 bits (Linear4bit, load_in_4bit=True)"
        )


def unpacked_shape(weight: Any) -> torch.Size:
    """Return the shape of a 4-bit weight before it is packed."""
    shape: torch.Size = weight.shape if weight.quant_state is None else weight.quant_state.shape
    return shape


def _refuse_packed(slot: Slot) -> None:
    weight: Any = slot.tensor
    if weight.bnb_quantized or not weight.is_floating_point():
        raise ValueError(
            f"{slot.name} is a packed 4-bit weight of bitsandbytes ({weight.dtype}) without a "
            f"quant_state, so that nothing can decode it; load it with its state (load_weights) or "
            f"make its layer without pre_quantized=True"
        )


def quantize_shape(shape: Any, weight: Any) -> None:
    """Set a shape to the packed shape and state that quantizing ``weight`` would produce."""
    bitsandbytes: Any = sys.modules["bitsandbytes"]
    with ACTIVE_SETTINGS.during(StepRules()):  # outside of a step a mean, of scales, is refused
        packed, state = bitsandbytes.functional.quantize_4bit(
            ShapeOnly(shape.meta.contiguous(), shape.device, shape.origins),
            blocksize=weight.blocksize,
            compress_statistics=weight.compress_statistics,
            quant_type=weight.quant_type,
            quant_storage=weight.quant_storage,
        )
    shape.data = packed
    shape.quant_state, shape.bnb_quantized = shape_only_quant_state(state, shape), True


def shape_only_quant_state(state: Any, shape: ShapeOnly) -> Any:
    """Return a copy of ``state`` whose scales are shape-only, on the device of ``shape``."""

    def shape_of(tensor: Tensor) -> ShapeOnly:
        return ShapeOnly(ShapeOnly.like(tensor, "").meta, shape.device, shape.origins)

    shapes = map_state(state, shape_of)
    shapes.as_dict = partial(_saved_shapes, shapes, shape)  # it would ask for the value of offset
    return shapes


def _saved_shapes(state: Any, shape: ShapeOnly, packed: bool = False) -> dict[str, Any]:
    zero = torch.zeros(())
    entries = map_state(state, lambda scale: scale if scale.dim() else zero).as_dict(packed)
    return {
        name: ShapeOnly(ShapeOnly.like(value, "").meta, shape.device, shape.origins)
        if isinstance(value, Tensor)
        else value
        for name, value in entries.items()
    }


def map_state(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a quantization state with ``change`` applied to the weight's scales.

    The scales come in a fixed order. The table of codes is shared.
    """
    mapped = copy.copy(state)
    vars(mapped).pop("as_dict", None)
    mapped.absmax = change(state.absmax)
    if state.offset is not None:
        mapped.offset = change(state.offset)
    if state.state2 is not None:  # the scales are quantized too
        mapped.state2 = map_state(state.state2, change)
    return mapped


def scales_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors of a weight's quantization state; none if it has no state."""
    scales: list[Tensor] = []
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        map_state(state, lambda scale: scales.append(scale) or scale)  # type: ignore[func-returns-value]
    return scales


def num_unpacked_values(tensor: Tensor) -> int:
    """Return the number of values of a weight; a packed one has several per element."""
    state = getattr(tensor, "quant_state", None)
    return tensor.numel() if state is None else state.shape.numel()


def bytes_on_device(slot: Slot) -> int:
    """Return the bytes of a slot's tensor on a device, including a quantized weight's scales."""
    tensor: Any = slot.tensor
    if is_4bit(tensor) and not tensor.bnb_quantized:
        tensor = ShapeOnly.like(tensor, slot.name)
        quantize_shape(tensor, slot.tensor)
    return sum(each.nbytes for each in (tensor, *scales_of(tensor)))


def describe_4bit(weight: Any) -> str:
    """Return a description of how a 4-bit weight is quantized."""
    scales = "8" if weight.compress_statistics else "32"
    return f"{weight.quant_type} in blocks of {weight.blocksize}, scales of {scales} bits"


def move_weight(slot: Slot, device: torch.device) -> None:
    """Move a parameter or buffer; an unquantized 4-bit weight is quantized, as by ``layer.to``."""
    weight: Any = slot.tensor
    quantize_if_4bit(weight, device)
    weight.data = weight.data.to(device)
    state = getattr(weight, "quant_state", None)
    if state is not None:
        state.to(device)


def quantize_if_4bit(weight: Any, device: torch.device) -> None:
    """Move an unquantized 4-bit weight to a device, which quantizes it."""
    if is_4bit(weight) and not weight.bnb_quantized:
        weight.to(device)


def map_with_quant_state(tensor: Tensor, send: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``send(tensor)``; send the quantization state of a quantized weight too."""
    sent, state = send(tensor), getattr(tensor, "quant_state", None)
    if state is not None:
        sent_state = map_state(state, send)
        if sent is not tensor:
            sent.quant_state = sent_state  # type: ignore[attr-defined]
    return sent


def copy_quant_state(slot: Slot, value: Tensor) -> None:
    """Set the quantization state of a slot's weight and layer to that of ``value``, if any."""
    state = getattr(value, "quant_state", None)
    if state is not None:
        _set_state(slot, state)


def _set_state(slot: Slot, state: Any) -> None:
    weight: Any = slot.tensor
    weight.quant_state = slot.module.quant_state = state
    weight.bnb_quantized = True


def sync_layer_quant_state(slot: Slot) -> None:
    """Set the layer's quantization state to that of the weight in its slot."""
    state = getattr(slot.tensor, "quant_state", None)
    if state is not None:
        slot.module.quant_state = state


def entries_of(name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the state dict's entries for the quantization state of weight ``name``."""
    return {key: value for key, value in state.items() if key.startswith(f"{name}.")}


def read_state(entries: Mapping[str, Tensor], device: Any) -> Any:
    """Return the quantization state that these entries of a state dict hold, on a device."""
    bitsandbytes: Any = sys.modules["bitsandbytes"]
    return bitsandbytes.functional.QuantState.from_dict(
        {key: value_of(value) for key, value in entries.items()}, device
    )


def read_shape_only_quant_state(entries: Mapping[str, Tensor], weight: ShapeOnly) -> Any:
    """Return the quantization state of saved entries with shape-only scales, for ``weight``."""
    scales = {
        key: ShapeOnly.like(value, key) for key, value in entries.items() if key.endswith("absmax")
    }
    return shape_only_quant_state(read_state({**entries, **scales}, weight.device), weight)


def load_packed(slot: Slot, packed: Tensor, entries: Mapping[str, Tensor]) -> None:
    """Load a packed 4-bit weight and its quantization state, ``entries`` of a checkpoint."""
    weight = slot.tensor
    weight.data = value_of(packed).to(weight.device)
    _set_state(slot, read_state(entries, weight.device))

"""The quantization state of a 4-bit weight whose values are on another rank.

bitsandbytes packs two values of a weight into a byte, and keeps in ``quant_state`` the scale of
each block of values (``absmax``) and how to decode both. A stand-in for such a weight needs the
same state, with a shape in place of the scales.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot, find_slots


def carry_quantization(stand_in: ShapeOnly, slot: Slot) -> None:
    """Give the stand-in of a quantized weight the state of the weight, without its scales.

    Raises:
        ValueError: The weight was never quantized, or to 8 bits.
    """
    state = getattr(slot.tensor, "quant_state", None) or getattr(slot.module, "quant_state", None)
    if slot.attribute == "weight" and state is not None:
        stand_in.quant_state = _without_scales(state, stand_in)  # type: ignore[attr-defined]
    elif hasattr(slot.tensor, "bnb_quantized"):
        raise ValueError(
            f"{slot.name} is a 4-bit weight of bitsandbytes without a quant_state, so it was never "
            f"quantized; load its values and then move its layer to a device, layer.to(device)"
        )
    elif hasattr(slot.tensor, "SCB"):
        raise ValueError(
            f"{slot.name} is an 8-bit weight of bitsandbytes, whose layer chooses what to quantize "
            f"by the values of its input; use 4 bits (Linear4bit, load_in_4bit=True)"
        )


def _without_scales(state: Any, stand_in: ShapeOnly) -> Any:
    made = copy.copy(state)
    (origin,) = stand_in.origins
    made.absmax = ShapeOnly.like(state.absmax, origin, device=stand_in.device)
    if getattr(state, "state2", None) is not None:  # the scales are quantized too
        made.state2 = _without_scales(state.state2, stand_in)
    return made


def quantization_in(module: nn.Module, state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what a state dict has beside each quantized weight of a module, by the weight's name.

    bitsandbytes saves these entries; ``Module.load_state_dict`` does not know them.
    """
    quantized = [slot.name for slot in find_slots(module) if hasattr(slot.tensor, "quant_state")]
    entries = {
        name: {key: value for key, value in state.items() if key.startswith(f"{name}.")}
        for name in quantized
    }
    return {name: found for name, found in entries.items() if found}


def load_quantization(module: nn.Module, entries: Mapping[str, dict[str, Any]]) -> None:
    """Load the entries of :func:`quantization_in` for the weights whose values are here."""
    for slot in find_slots(module):
        weight: Any = slot.tensor
        if slot.name in entries and not isinstance(weight, ShapeOnly):
            weight.quant_state = type(weight.quant_state).from_dict(
                {**entries[slot.name]}, weight.device
            )
            slot.module.quant_state = weight.quant_state

"""How many floating-point operations an operation takes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def count_flops(func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> int:
    """Count the operations of matrix products, convolutions and attention; 0 for others."""
    packet = func.overloadpacket
    if packet.__name__.startswith("_scaled_dot_product"):  # torch has no formula for all of them
        query, key, value = args[:3]
        rows = query.shape[:-1].numel()
        return int(2 * rows * key.shape[-2] * (query.shape[-1] + value.shape[-1]))
    if packet is torch.ops.aten._grouped_mm:  # each row of the left with its group's matrix
        return int(2 * args[0].numel() * args[1].shape[-1])
    formula = flop_registry.get(packet)
    return int(formula(*args, out_val=result)) if formula else 0

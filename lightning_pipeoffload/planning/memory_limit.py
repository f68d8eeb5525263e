"""How much memory a plan may take: as people write it, or what a device has left for it."""

from __future__ import annotations

import re

import torch

# The rest is for the allocator's fragments, and for what the plan does not know of.
_SHARE_PLANNED = 0.9

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}iB": 1 << 10 * power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("KMGT", start=1)}


def parse_bytes(value: int | str, name: str = "memory_limit") -> int:
    """Read an amount of memory.

    Args:
        value: Bytes, or a number with a unit: "40GiB", "500 MB".
        name: The name of the argument, for the error.

    Raises:
        ValueError: The value is neither, or not positive.
    """
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", str(value).strip())
    if match is None or match[2] not in _UNITS or not _number(match[1]) > 0:
        raise ValueError(
            f'{name}={value!r} is no amount of memory; use bytes, or a text such as "40GiB"'
        )
    return int(_number(match[1]) * _UNITS[match[2]])


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def device_limit(device: torch.device, activation_bytes: int) -> int | None:
    """Return the bytes that a device has for activations, after a step or more; None on CPU.

    Everything else that was there at the peak (parameters, gradients, the optimizer's state, what
    is there for a moment) needs its place again.

    Args:
        device: The device of this rank.
        activation_bytes: The most that activations took of it so far.
    """
    if device.type == "cpu":
        return None
    free, _ = torch.accelerator.get_memory_info(device)
    # The driver and NCCL have taken theirs beside torch, other processes too.
    ours = free + torch.accelerator.memory_reserved(device)
    others = torch.accelerator.max_memory_allocated(device) - activation_bytes
    return max(0, int(_SHARE_PLANNED * ours) - others)

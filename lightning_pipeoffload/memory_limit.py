"""Amounts of memory as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}iB": 1 << 10 * power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("KMGT", start=1)}


def parse_bytes(value: int | str, name: str = "memory_limit") -> int:
    """Read an amount of memory.

    Args:
        value: bytes, or a number with a unit: "40GiB", "500 MB".
        name: of the argument, for the error.

    Raises:
        ValueError: it is neither, or not positive.
    """
    match = re.fullmatch(r"([0-9.]+)\s*([A-Za-z]*)", str(value).strip())
    if match is None or match[2] not in _UNITS or not _number(match[1]) > 0:
        raise ValueError(
            f'{name}={value!r} is no amount of memory; use bytes, or a text such as "40GiB"'
        )
    return int(_number(match[1]) * _UNITS[match[2]])


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0

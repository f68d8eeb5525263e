"""How bytes are told: in one unit wherever a run says them."""

from __future__ import annotations

from math import ceil

__all__ = ["mebibytes"]


def mebibytes(num_bytes: float) -> str:
    """Write bytes in the one unit that a run tells memory in, rounded up: "1.50 MiB"."""
    return f"{ceil(num_bytes / 2**20 * 100) / 100:,.2f} MiB"

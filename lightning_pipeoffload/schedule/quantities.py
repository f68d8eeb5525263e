"""Formats times, bytes and shares for all output of runs and commands."""

from __future__ import annotations

from math import ceil

__all__ = ["bytes_text", "seconds_text", "share_text"]

_MIB, _GIB = 1 << 20, 1 << 30


def bytes_text(num_bytes: float) -> str:
    """Format bytes, rounded up: "1.50 MiB", from 10 GiB on "12.25 GiB"."""
    size, unit = (_GIB, "GiB") if num_bytes >= 10 * _GIB else (_MIB, "MiB")
    return f"{ceil(num_bytes / size * 100) / 100:,.2f} {unit}"


def seconds_text(seconds: float) -> str:
    """Format a time: "12.34 s", "48.4 ms" or "120 µs"."""
    if seconds >= 1:
        return f"{seconds:.4g} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} µs"


def share_text(share: float) -> str:
    """Format a share, such as a bubble: "14.1 %"."""
    return f"{100 * share:.1f} %"

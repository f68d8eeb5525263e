"""Colours as ``#rrggbb``: a lighter shade of one, and the ink that is readable on one."""

from __future__ import annotations

__all__ = ["ink_on", "lighter"]

DARK_INK, LIGHT_INK = "#111111", "#ffffff"


def lighter(color: str, share: float) -> str:
    """Mix a colour with white, of which ``share`` is from 0 to 1."""
    mixed = (round(part + (255 - part) * share) for part in _parts(color))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def ink_on(color: str) -> str:
    """Return black or white, whichever is easier to read on a colour (ITU-R BT.601 luma)."""
    red, green, blue = _parts(color)
    return DARK_INK if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else LIGHT_INK


def _parts(color: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(color.removeprefix("#"))
    return red, green, blue

"""Memory that was freed, given back to the system while more is taken.

glibc keeps what is freed between blocks that are not, and takes other memory for what is larger
than these gaps: parameters that are dropped one by one would stay resident, most of the module.
"""

from __future__ import annotations

import ctypes

_MOST_KEPT = 32 << 20  # bytes


class FreedMemory:
    """Counts what is dropped, and gives it back from time to time."""

    def __init__(self) -> None:
        self._num_bytes = 0
        # Of glibc only; others give large blocks back at once.
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def note(self, num_bytes: int) -> None:
        """Note that so much is about to be freed."""
        if self._num_bytes > _MOST_KEPT:
            self.give_back()
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        """Give back what is free."""
        self._num_bytes = 0
        if self._trim is not None:
            self._trim(0)

"""What tells the batches of a rank apart, for the ranks to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_pipeoffload.runtime.microbatch import start_checksum

_Started = tuple[Callable[[], int], str]


class BatchChecksums:
    """A rank's batches, one by one; on an accelerator one late, for then nobody waits for it.

    Args:
        are_late: Whether the batches are on an accelerator.
    """

    def __init__(self, are_late: bool) -> None:
        self._are_late = are_late
        self._before: _Started = _NOTHING

    def see(self, batch: Any, what: str) -> tuple[int, str]:
        """Take a batch.

        Args:
            batch: Any pytree.
            what: What the batch is, in words, for an error.

        Returns:
            The checksum that is known by now, and of what it is: of the batch before, maybe.
        """
        seen: _Started = start_checksum(batch), what
        if self._are_late:
            seen, self._before = self._before, seen
        return seen[0](), seen[1]

    def see_last(self) -> tuple[int, str]:
        """Return what is known of the last batch; waits for it."""
        (finish, what), self._before = self._before, _NOTHING
        return finish(), what


_NOTHING: _Started = (lambda: 0, "nothing")

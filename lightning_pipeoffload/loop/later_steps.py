"""Whether the optimizer steps after a batch, or after a later one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.strategies import ParallelStrategy
from typing_extensions import override


class LaterSteps(ParallelStrategy):
    """Notes on which batches Lightning only accumulates gradients."""

    _steps_later = False

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning trains in here on every batch after which it does not step."""
        self._steps_later = True
        try:
            yield
        finally:
            self._steps_later = False

"""Where a batch is among those whose gradients add up; each of them runs by a plan of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accumulation:
    """The batches that add up to one optimizer step.

    Attributes:
        num_batches: How many there are.
        is_first: Whether gradients are set to zero before this batch's backward.
        is_last: Whether the optimizer steps after it.
        watched_by: Hooks of the user that may read gradients in between.
    """

    num_batches: int = 1
    is_first: bool = True
    is_last: bool = True
    watched_by: tuple[str, ...] = ()

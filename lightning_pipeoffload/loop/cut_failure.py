"""Tells a step that fails from one that fails because its batch was cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def blame_cutting(
    error: Exception, kind: str, total: int, size: int, cut_whole: Callable[[], Any]
) -> None:
    """Say so where the step fails with a microbatch, and would not with the whole batch.

    Args:
        error: What was raised with a microbatch.
        kind: The kind of the step.
        total: Samples of the batch.
        size: Samples of a microbatch.
        cut_whole: Looks at the step with the whole batch.

    Raises:
        ValueError: The step fails with a microbatch, and would not with the batch.
    """
    try:
        cut_whole()
    except Exception:
        return  # the first error counts, which is the caller's
    raise ValueError(
        f"{kind} fails with a microbatch, and not with the whole batch of {total} samples that was "
        f"cut into {-(-total // size)}: {type(error).__name__}: {error}; set a smaller "
        f"num_microbatches or a larger batch_size, or leave out a short last batch with "
        f"drop_last=True"
    ) from error

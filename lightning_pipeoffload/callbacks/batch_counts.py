"""What a batch holds: samples, and tokens where that is plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_pipeoffload.runtime.microbatch import batch_size

__all__ = ["count_batch"]


def count_batch(batch: Any, tokens: Callable[[Any], Any] | None) -> dict[str, Any]:
    """Count a batch, without waiting for an accelerator.

    Args:
        batch: The batch.
        tokens: Returns the tokens of a batch: a number, or a tensor of one element; None: those
            that ``attention_mask`` lets through, or else the size of ``input_ids``.
    """
    found = _tokens_in(batch) if tokens is None else tokens(batch)
    return {"samples": batch_size(batch)} | ({} if found is None else {"tokens": found})


def _tokens_in(batch: Any) -> Any:
    if not isinstance(batch, Mapping):
        return None
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if not isinstance(ids, Tensor):
        return None
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        return mask.count_nonzero()
    return ids.numel()

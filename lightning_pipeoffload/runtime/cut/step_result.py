"""What a training step has returned: the loss, or what is refused in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def loss_in(result: Any) -> Tensor:
    """Find the loss in what a training step returned, as Lightning does.

    Raises:
        ValueError: There is no loss in it.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        returned = "None" if result is None else type(result).__name__
        raise ValueError(
            f"the training step returned {returned} without a loss; a pipeline cannot skip a "
            f"batch, whose backward the other stages wait for: call the blocks all the same, and "
            f"return a loss times 0"
        )
    return loss

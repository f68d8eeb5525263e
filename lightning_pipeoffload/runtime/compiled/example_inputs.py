"""What a compiler is shown in place of inputs that the region's code does not have."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode  # private: who imagines values for this compilation


class ExampleInputs:
    """Makes examples beside those that dynamo gives.

    A compiler would take sizes of a tensor that dynamo does not know for new symbols.

    Args:
        inputs: Those that dynamo gives.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._mode = detect_fake_mode(inputs)

    def weight(self, weight: Tensor) -> Tensor:
        """Return the example of a weight."""
        if self._mode is None:
            return weight.detach()
        return self._mode.from_tensor(weight.detach(), static_shapes=True)

    def zero(self, result: Tensor) -> Tensor:
        """Return the example of what is added to a result."""
        with self._mode or nullcontext():
            zero = torch.zeros((), dtype=result.dtype, device=result.device)
            return zero.expand(result.shape).detach().requires_grad_()

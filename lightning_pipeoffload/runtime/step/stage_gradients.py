"""A separate gradient per stage for weights that several stages of a rank use.

The order in which backwards of two stages alternate depends on the plan, and with it the rounding
of a tied weight's gradient. So each stage accumulates a gradient of its own, in the order of its
microbatches, and these are summed once, in the order of the stages. Then the bits are the same for
every plan::

    rank 0 of zb_v        B3  W3  B3  B0  W3  W0  B3 ...     stages 0 and 3 use the weight
    parameter.grad        the gradient of stage 0            + that of stage 3, at the end
    StageGradient.grad    the gradient of stage 3            swapped with parameter.grad while
                                                             stage 3 runs B or W
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


class StageGradient:
    """One stage's gradient of a weight that an earlier stage of the rank also uses.

    Attributes:
        grad: The gradient. While B or W of the stage runs, it is in ``parameter.grad`` instead.
    """

    grad: Tensor | None = None

    def __init__(self, parameter: Tensor, stage: int) -> None:
        self.parameter = parameter
        self.stage = stage

    def swap_with_parameter(self) -> None:
        """Swap :attr:`grad` with ``parameter.grad``."""
        self.parameter.grad, self.grad = self.grad, self.parameter.grad

    @torch.no_grad()
    def add(self) -> None:
        """Add :attr:`grad` to ``parameter.grad``, and set it to None."""
        gradient, self.grad = self.grad, None
        if self.parameter.grad is None:
            self.parameter.grad = gradient
        elif gradient is not None:
            self.parameter.grad.add_(gradient)


class SwappedGradients:
    """Context of one stage's B and W, in which ``.grad`` of shared weights is the stage's own."""

    def __init__(self, gradients: Sequence[StageGradient] = ()) -> None:
        self._gradients = gradients

    def __len__(self) -> int:
        return len(self._gradients)

    def __enter__(self) -> None:
        for gradient in self._gradients:
            gradient.swap_with_parameter()

    def __exit__(self, *error: object) -> None:
        for gradient in self._gradients:
            gradient.swap_with_parameter()

    def forget(self) -> None:
        """Drop the gradients, after an error."""
        for gradient in self._gradients:
            gradient.grad = None


def stage_gradients(
    parameters: Mapping[str, tuple[Tensor, Iterable[int]]],
) -> dict[str, StageGradient]:
    """Return the separate gradients by name, in the order in which they are summed.

    Args:
        parameters: A rank's parameters by name, each with the rank's stages that use it; the first
            of these uses ``parameter.grad`` itself.
    """
    return {
        f"{name} of stage {stage}": StageGradient(parameter, stage)
        for name, (parameter, stages) in parameters.items()
        for stage in sorted(stages)[1:]
    }

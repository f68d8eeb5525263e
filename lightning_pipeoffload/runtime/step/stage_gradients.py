"""A separate gradient per stage for weights that several stages of a rank use.

The order in which backwards of two stages alternate depends on the plan. So that the bits of a tied
weight's gradient do not, each stage accumulates its own gradient in the order of its microbatches,
and these are summed once, in the order of the stages::

    rank 0 of zb_v     B3  W3  B3  B0  W3  W0  B3 ...   stages 0 and 3 use the weight
    parameter.grad     [ of stage 0                ]  + that of stage 3
    here               [ of stage 3; parameter.grad while its B and W run ]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


class StageGradient:
    """One stage's gradient of a weight that an earlier stage of the rank uses too.

    Attributes:
        grad: The gradient while no action of the stage runs; then it is in ``parameter.grad``.
    """

    grad: Tensor | None = None

    def __init__(self, parameter: Tensor, stage: int) -> None:
        self.parameter = parameter
        self.stage = stage

    def exchange(self) -> None:
        """Swap it with ``parameter.grad``."""
        self.parameter.grad, self.grad = self.grad, self.parameter.grad

    @torch.no_grad()
    def add(self) -> None:
        """Add it to ``parameter.grad``."""
        gradient, self.grad = self.grad, None
        if self.parameter.grad is None:
            self.parameter.grad = gradient
        elif gradient is not None:
            self.parameter.grad.add_(gradient)


class OwnGradients:
    """Context of one stage's B and W: ``.grad`` of shared weights is the stage's own."""

    def __init__(self, gradients: Sequence[StageGradient] = ()) -> None:
        self._gradients = gradients

    def __len__(self) -> int:
        return len(self._gradients)

    def __enter__(self) -> None:
        for gradient in self._gradients:
            gradient.exchange()

    def __exit__(self, *error: object) -> None:
        for gradient in self._gradients:
            gradient.exchange()

    def forget(self) -> None:
        """Drop them, after an error."""
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

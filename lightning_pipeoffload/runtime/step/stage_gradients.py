"""A gradient per stage for a weight that several stages of one rank use.

A plan decides in which order the backwards of two stages take turns. Added up as they come, the
bits of a tied weight's gradient would depend on the plan; so each stage adds up its own, in the
order of its microbatches, and these are summed once, in the order of the stages::

    rank 0 of zb_v     B3  W3  B3  B0  W3  W0  B3 ...   stages 0 and 3 use the weight
    parameter.grad     [ of stage 0                ]  + that of stage 3
    here               [ of stage 3; parameter.grad while its B and W run ]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


class StageGradient:
    """The gradient that one stage gives a weight which an earlier stage of the rank uses too.

    Attributes:
        grad: The gradient, while no action of the stage runs.
    """

    grad: Tensor | None = None

    def __init__(self, parameter: Tensor, stage: int) -> None:
        self.parameter = parameter
        self.stage = stage

    def exchange(self) -> None:
        """Exchange it with what is in the weight's own place."""
        self.parameter.grad, self.grad = self.grad, self.parameter.grad

    @torch.no_grad()
    def add(self) -> None:
        """Add it to the weight's own."""
        found, self.grad = self.grad, None
        if self.parameter.grad is None:
            self.parameter.grad = found
        elif found is not None:
            self.parameter.grad.add_(found)


class OwnGradients:
    """Gives weights the gradients of one stage while its B or W runs inside."""

    def __init__(self, gradients: Sequence[StageGradient] = ()) -> None:
        self._gradients = gradients

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
    """Make what keeps gradients apart, by a name for each, in the order in which they are summed.

    Args:
        parameters: A rank's parameters by name, each with the rank's stages that use it; the first
            of these has the parameter's own ``grad``.
    """
    return {
        f"{name} of stage {stage}": StageGradient(parameter, stage)
        for name, (parameter, stages) in parameters.items()
        for stage in sorted(stages)[1:]
    }

"""Clipping of a rank's own gradients, by a norm that is of all stages together.

The norm of each gradient is squared, and all ranks sum these in the order of the optimizer's
parameters: so its bits do not depend on which rank has which.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeoffload.loop.step_border import Clipping, StepBorder
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.shapes.foreign_tensor import GradientAge
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly


def clip_over_ranks(
    precision: Precision, group: PipelineGroup, age: GradientAge, border: StepBorder
) -> None:
    """Let a precision plugin clip by the norm over all ranks, tied weights counted once.

    Args:
        precision: The plugin that Lightning asks to clip.
        group: The pipeline's processes.
        age: The age of the gradients that other ranks have, which they clip alike.
        border: What knows whether the ranks wait for the norm.
    """
    by_norm = partial(_clip, precision, group, age, border)
    precision.clip_grad_by_norm = by_norm  # type: ignore[method-assign]
    by_value = partial(_clip_values, precision, age)
    precision.clip_grad_by_value = by_value  # type: ignore[method-assign]


def clip_by_own_norm(precision: Precision) -> None:
    """Let a precision plugin clip as any other one again."""
    for name in ("clip_grad_by_norm", "clip_grad_by_value"):
        precision.__dict__.pop(name, None)


def _clip(
    precision: Precision,
    group: PipelineGroup,
    age: GradientAge,
    border: StepBorder,
    optimizer: Optimizer,
    clip_val: float,
) -> None:
    squares = _squared_norms([*precision.main_params(optimizer)], group)
    clipping = Clipping(_own_parameters(precision, optimizer), clip_val, squares)
    if border.guesses_clipping():
        border.expect_clipping(clipping)
        return
    clipping.clip(clipping.norm(group.sum(squares)))
    age.change()


def _clip_values(
    precision: Precision, age: GradientAge, optimizer: Optimizer, clip_val: float
) -> None:
    nn.utils.clip_grad_value_(_own_parameters(precision, optimizer), clip_val)
    age.change()


def _squared_norms(parameters: Sequence[Tensor], group: PipelineGroup) -> Tensor:
    """Return those of the gradients that this rank counts, in float64; 0 in place of the others."""
    counted = {
        place: parameter.grad
        for place, parameter in enumerate(parameters)
        if not isinstance(parameter, ShapeOnly) and group.counts(parameter)
        if parameter.grad is not None
    }
    if not counted:
        return torch.zeros(len(parameters), dtype=torch.float64, device=group.device)
    # Private: as torch's own clipping, one kernel for many.
    norms = dict(zip(counted, torch._foreach_norm([*counted.values()]), strict=True))
    none = torch.zeros_like(next(iter(norms.values())))
    return torch.stack([norms.get(place, none) for place in range(len(parameters))]).double() ** 2


def _own_parameters(precision: Precision, optimizer: Optimizer) -> list[Tensor]:
    own = (p for p in precision.main_params(optimizer) if not isinstance(p, ShapeOnly))
    return [parameter for parameter in own if parameter.grad is not None]

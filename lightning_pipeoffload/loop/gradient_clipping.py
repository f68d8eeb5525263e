"""Clipping of a rank's own gradients, by a norm that is of all stages together."""

from __future__ import annotations

from functools import partial

from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.shapes.foreign_tensor import GradientAge
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly


def clip_over_ranks(precision: Precision, group: PipelineGroup, age: GradientAge) -> None:
    """Let a precision plugin clip by the norm over all ranks, tied weights counted once.

    Args:
        precision: The plugin that Lightning asks to clip.
        group: The pipeline's processes.
        age: The age of the gradients that other ranks have, which they clip alike.
    """
    by_norm = partial(_clip, precision, group, age)
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
    optimizer: Optimizer,
    clip_val: float,
) -> None:
    parameters = _own_parameters(precision, optimizer)
    counted = [p.grad for p in parameters if group.counts(p) and p.grad is not None]
    clip_grads_with_norm_(parameters, clip_val, group.global_norm(counted))
    age.change()


def _clip_values(
    precision: Precision, age: GradientAge, optimizer: Optimizer, clip_val: float
) -> None:
    nn.utils.clip_grad_value_(_own_parameters(precision, optimizer), clip_val)
    age.change()


def _own_parameters(precision: Precision, optimizer: Optimizer) -> list[Tensor]:
    own = (p for p in precision.main_params(optimizer) if not isinstance(p, ShapeOnly))
    return [parameter for parameter in own if parameter.grad is not None]

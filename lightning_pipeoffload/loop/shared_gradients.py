"""What a step needs to know of the gradients of all stages: clipping, the loss scale."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import Precision

from lightning_pipeoffload.loop.gradient_clipping import clip_by_own_norm, clip_over_ranks
from lightning_pipeoffload.loop.loss_scale import leave_loss_scale, share_loss_scale
from lightning_pipeoffload.loop.step_border import StepBorder
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.shapes.foreign_tensor import GradientAge


def share_gradients(precision: Precision, group: PipelineGroup, age: GradientAge) -> StepBorder:
    """Let a precision plugin go by the gradients of all stages.

    Args:
        precision: The plugin.
        group: The pipeline's processes.
        age: The age of the gradients that other ranks have.

    Returns:
        What knows whether the ranks wait for each other there.
    """
    border = StepBorder(group, age)
    clip_over_ranks(precision, group, age, border)
    share_loss_scale(precision, group, age, border)
    return border


def leave_gradients(precision: Precision, border: StepBorder | None) -> None:
    """Let a precision plugin go by its own gradients again.

    Args:
        precision: The plugin.
        border: What it was given; None: nothing.
    """
    clip_by_own_norm(precision)
    leave_loss_scale(precision)
    if border is not None:
        border.forget()

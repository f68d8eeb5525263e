"""Clipping by the gradient's norm, which is of all stages together."""

from __future__ import annotations

from functools import partial

from lightning.pytorch.plugins.precision import Precision
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from lightning_pipeoffload.collectives import PipelineGroup
from lightning_pipeoffload.runtime.shape_only import ShapeOnly


def clip_by_norm_of_all(precision: Precision, group: PipelineGroup) -> None:
    """Let a precision plugin clip by the norm over all ranks, tied weights counted once.

    Args:
        precision: is asked by Lightning to clip.
        group: the pipeline's processes.
    """
    precision.clip_grad_by_norm = partial(_clip, precision, group)  # type: ignore[method-assign]


def clip_by_own_norm(precision: Precision) -> None:
    """Let a precision plugin clip as any other one again."""
    precision.__dict__.pop("clip_grad_by_norm", None)


def _clip(
    precision: Precision, group: PipelineGroup, optimizer: Optimizer, clip_val: float
) -> None:
    own = [p for p in precision.main_params(optimizer) if not isinstance(p, ShapeOnly)]
    parameters = [p for p in own if p.grad is not None]
    counted = [p.grad for p in parameters if group.counts(p) and p.grad is not None]
    clip_grads_with_norm_(parameters, clip_val, group.global_norm(counted))

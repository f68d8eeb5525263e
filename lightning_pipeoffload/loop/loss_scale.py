"""The loss scale of float16, on which all stages have to agree.

Gradients that overflow on one stage are infinite there only; the step is skipped, and the scale
lowered, on every rank or on none.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_pipeoffload.loop.step_border import Scaling, StepBorder
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.shapes.foreign_tensor import GradientAge
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly


def scaler_of(precision: Precision) -> GradScaler | None:
    """Return the scaler of a precision plugin that has one."""
    return getattr(precision, "scaler", None)


def share_loss_scale(
    precision: Precision, group: PipelineGroup, age: GradientAge, border: StepBorder
) -> None:
    """Let a precision plugin's scaler skip a step where the gradients of any rank overflow.

    Args:
        precision: The plugin that unscales gradients when Lightning asks it for a step.
        group: The pipeline's processes.
        age: The age of the gradients that other ranks have, which they unscale alike.
        border: What knows whether the ranks wait for each other here.
    """
    scaler = scaler_of(precision)
    if scaler is not None:
        # Private: unscale_ and step both look for infinities by it, and by nothing else.
        scaler._unscale_grads_ = partial(  # type: ignore[method-assign]
            _unscale, scaler, group, age, border
        )


def leave_loss_scale(precision: Precision) -> None:
    """Let a precision plugin's scaler look at its own gradients only again."""
    scaler = scaler_of(precision)
    if scaler is not None:
        scaler.__dict__.pop("_unscale_grads_", None)


def _unscale(  # noqa: PLR0913 - torch's own, and whom to ask
    scaler: GradScaler,
    group: PipelineGroup,
    age: GradientAge,
    border: StepBorder,
    optimizer: Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> dict[Any, Tensor]:
    """Do what the scaler does with this rank's gradients, and tell what was found on any rank."""
    members = [p for g in optimizer.param_groups for p in g["params"]]
    own: Any = SimpleNamespace(
        param_groups=[{"params": [p for p in members if not isinstance(p, ShapeOnly)]}]
    )
    found = type(scaler)._unscale_grads_(scaler, own, inv_scale, found_inf, allow_fp16)
    age.change()
    # A rank whose parameters are frozen has looked at nothing.
    own = found.get(found_inf.device, found_inf)
    if border.guesses():
        border.expect_scaling(_scaling(scaler, own))
        return {found_inf.device: own}
    return {found_inf.device: group.largest(own)}


def _scaling(scaler: GradScaler, found: Tensor) -> Scaling:
    """Return how a scale goes on, by the numbers that it has now."""
    # Private: the scale, and how many steps in a row it was not too large.
    scale, growth = scaler._scale, scaler._growth_tracker
    assert scale is not None
    assert growth is not None
    numbers = scale, growth
    before = [number.clone() for number in numbers]

    def lower() -> None:
        for number, was in zip(numbers, before, strict=True):
            number.copy_(was)
        factors = scaler.get_growth_factor(), scaler.get_backoff_factor()
        # Private: what the scaler itself calls at the end of a step.
        torch._amp_update_scale_(
            scale, growth, torch.ones_like(scale), *factors, scaler.get_growth_interval()
        )

    return Scaling(found, lower, numbers)

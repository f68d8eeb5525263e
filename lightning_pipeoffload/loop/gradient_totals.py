"""What a step needs to know of the gradients of all stages: their norm, and whether any overflow.

The norm of each gradient is squared, and all ranks sum these in the order of the optimizer's
parameters, so its bits do not depend on which rank has which. Gradients that overflow in float16 on
one stage are infinite there only; the step is skipped, and the scale lowered, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_pipeoffload.loop.step_boundary import Clipping, Scaling, StepBoundary
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.shapes.remote_tensor import GradientAge
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly


class GradientTotals:
    """Clips by the norm over all ranks, and finds what overflows on any."""

    def __init__(
        self, precision: Precision, group: PipelineGroup, age: GradientAge, boundary: StepBoundary
    ) -> None:
        self._precision, self._group, self._age, self._boundary = precision, group, age, boundary

    def clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by the norm over all ranks, tied weights counted once."""
        squares = self._squared_norms([*self._precision.main_params(optimizer)])
        clipping = Clipping(self._own_parameters(optimizer), clip_val, squares)
        if self._boundary.guesses_clipping():
            self._boundary.expect_clipping(clipping)
            return
        clipping.clip(clipping.norm(self._group.sum(squares)))
        self._age.change()

    def clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of this rank's gradients."""
        nn.utils.clip_grad_value_(self._own_parameters(optimizer), clip_val)
        self._age.change()

    def _squared_norms(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return those of the gradients that this rank counts, in float64; 0 for the others."""
        counted = {
            place: parameter.grad
            for place, parameter in enumerate(parameters)
            if not isinstance(parameter, ShapeOnly) and self._group.counts(parameter)
            if parameter.grad is not None
        }
        if not counted:
            return torch.zeros(len(parameters), dtype=torch.float64, device=self._group.device)
        # Private: as torch's own clipping, one kernel for many.
        norms = dict(zip(counted, torch._foreach_norm([*counted.values()]), strict=True))
        none = torch.zeros_like(next(iter(norms.values())))
        return torch.stack([norms.get(i, none) for i in range(len(parameters))]).double() ** 2

    def _own_parameters(self, optimizer: Optimizer) -> list[Tensor]:
        own = (p for p in self._precision.main_params(optimizer) if not isinstance(p, ShapeOnly))
        return [parameter for parameter in own if parameter.grad is not None]

    def unscale(
        self,
        scaler: GradScaler,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[Any, Tensor]:
        """Do what the scaler does with this rank's gradients; find what any rank has found."""
        members = [p for g in optimizer.param_groups for p in g["params"]]
        own: Any = SimpleNamespace(
            param_groups=[{"params": [p for p in members if not isinstance(p, ShapeOnly)]}]
        )
        found = type(scaler)._unscale_grads_(scaler, own, inv_scale, found_inf, allow_fp16)
        self._age.change()
        # A rank whose parameters are frozen has looked at nothing.
        own = found.get(found_inf.device, found_inf)
        if self._boundary.guesses():
            self._boundary.expect_scaling(_scaling(scaler, own))
            return {found_inf.device: own}
        return {found_inf.device: self._group.largest(own)}


def _scaling(scaler: GradScaler, found: Tensor) -> Scaling:
    """Return how a scale goes on, by the numbers that it has now."""
    # Private: the scale, and how many steps in a row it was not too large.
    scale, growth = scaler._scale, scaler._growth_tracker
    assert scale is not None
    assert growth is not None
    return Scaling(found, partial(_lower, scaler, scale.clone(), growth.clone()), (scale, growth))


def _lower(scaler: GradScaler, scale: Tensor, growth: Tensor) -> None:
    """Lower the scale as it was before the step."""
    current: Any = scaler._scale
    current_growth: Any = scaler._growth_tracker
    current.copy_(scale)
    current_growth.copy_(growth)
    factors = scaler.get_growth_factor(), scaler.get_backoff_factor()
    # Private: what the scaler itself calls at the end of a step.
    torch._amp_update_scale_(
        current, current_growth, torch.ones_like(scale), *factors, scaler.get_growth_interval()
    )

"""What Lightning does around one backward, for steps that run several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.amp import GradScaler

from lightning_pipeoffload.loop.pipeline_run import PipelineRun
from lightning_pipeoffload.planning.training_plan import Accumulation
from lightning_pipeoffload.runtime.groups import PipelineGroup


def scaler_of(precision: Precision) -> GradScaler | None:
    """Return the scaler of a precision plugin that has one."""
    return getattr(precision, "scaler", None)


class BackwardHooks:
    """Runs zero_grad and the hooks around a batch, and each microbatch's own backward within.

    Attributes:
        adds_up: Whether the next batch's gradients add up to those that are there.
    """

    def __init__(self, module: LightningModule, precision: Precision, device: torch.device) -> None:
        self._module, self._precision, self._device = module, precision, device
        self._scaler = scaler_of(precision)
        self._zero_grad: Callable[[], None] | None = None
        self.adds_up = True

    def expect(self, zero_grad: Callable[[], None] | None) -> None:
        """Keep the call that Lightning makes before a batch's backward; None: gradients add up."""
        self._zero_grad = zero_grad
        self.adds_up = zero_grad is None

    def differentiate(self, loss: Tensor) -> None:
        """Run the backward of one microbatch's loss."""
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self._precision.backward(loss, self._module, None)

    def _zero(self) -> None:
        if self._zero_grad is not None:
            self._zero_grad()

    def _begin(self, loss: Tensor | None) -> None:
        self._precision.pre_backward(self._shown(loss), self._module)

    def _shown(self, loss: Tensor | None) -> Tensor:
        """Return the loss for hooks; zero on a rank without one."""
        return torch.zeros((), device=self._device) if loss is None else loss


class BatchBackward(BackwardHooks):
    """The hooks before and after all the backwards of a batch of the pipeline."""

    def __init__(
        self,
        module: LightningModule,
        precision: Precision,
        run: PipelineRun,
        group: PipelineGroup,
    ) -> None:
        super().__init__(module, precision, run.pipeline.device)
        self._run, self._group = run, group
        self._is_summed = False

    def start(self, results: Sequence[Any]) -> None:
        """Do what Lightning does between a training step and its backward.

        Args:
            results: The results of the microbatches' steps, as far as there are any on this rank.
        """
        self._zero()
        self._begin(_loss_of(results[-1]) if results else None)
        if self._is_summed:
            self._group.part_shared_gradients()
            self._is_summed = False

    def end(self, output: Any, accumulation: Accumulation) -> Any:
        """Do what Lightning does after a backward; return the output, or a zero for the loss."""
        if accumulation.is_last:
            self._run.finish_reduction()
        if accumulation.is_last or accumulation.watched_by:
            self._run.pipeline.sum_stage_gradients()
            self._group.sum_shared_gradients()
            self._is_summed = True
        self._run.pipeline.gradient_age.change()
        output = self._shown(None) if output is None else output
        self._precision.post_backward(self._shown(_loss_of(output)), self._module)
        return output


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None

"""What Lightning does around a backward, around all the backwards of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_pipeoffload.loop.loss_scale import scaler_of
from lightning_pipeoffload.loop.pipeline_run import PipelineRun
from lightning_pipeoffload.planning.accumulation import Accumulation
from lightning_pipeoffload.runtime.groups import PipelineGroup


class BatchBackward:
    """The hooks before and after, and each microbatch's own backward in between.

    Args:
        module: The user's module.
        precision: Lightning's part of the backward, hooks included.
        run: What runs the module on this rank.
        group: The pipeline's processes.

    Attributes:
        adds_up: Whether the next batch's gradients add up to what there is.
    """

    def __init__(
        self,
        module: LightningModule,
        precision: Precision,
        run: PipelineRun,
        group: PipelineGroup,
    ) -> None:
        self._module = module
        self._precision = precision
        self._run = run
        self._group = group
        self._scaler = scaler_of(precision)
        self._is_summed = False
        self._zero_grad: Callable[[], None] | None = None
        self.adds_up = True

    def expect(self, zero_grad: Callable[[], None] | None) -> None:
        """Keep what Lightning would do before a batch's backward.

        Args:
            zero_grad: A function that sets gradients to zero; None where Lightning does not.
        """
        self._zero_grad = zero_grad
        self.adds_up = zero_grad is None

    def start(self, results: Sequence[Any]) -> None:
        """Do what Lightning does between a training step and its backward.

        Args:
            results: The results of the microbatches' steps, as far as there are any on this rank.
        """
        if self._zero_grad is not None:
            self._zero_grad()
        self._precision.pre_backward(self._loss_of(results[-1] if results else None), self._module)
        if self._is_summed:
            self._group.part_shared_gradients()
            self._is_summed = False

    def differentiate(self, loss: Tensor) -> None:
        """Run the backward of one microbatch's loss."""
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self._precision.backward(loss, self._module, None)

    def end(self, output: Any, accumulation: Accumulation) -> Any:
        """Do what Lightning does after a backward.

        Args:
            output: The output of the step; None on ranks that do not have it.
            accumulation: The batch's accumulation.

        Returns:
            The output, or what stands for the loss.
        """
        if accumulation.is_last:
            self._run.finish_reduction()
        if accumulation.is_last or accumulation.watched_by:
            self._group.sum_shared_gradients()
            self._is_summed = True
        self._run.pipeline.gradient_age.change()
        output = self._no_loss() if output is None else output
        self._precision.post_backward(self._loss_of(output), self._module)
        return output

    def _loss_of(self, output: Any) -> Tensor:
        loss = output.get("loss") if isinstance(output, Mapping) else output
        return loss if isinstance(loss, Tensor) else self._no_loss()

    def _no_loss(self) -> Tensor:
        return torch.zeros((), device=self._run.pipeline.device)

"""What Lightning does around a backward, around all the backwards of a batch of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_pipeoffload.loop.backward_hooks import BackwardHooks
from lightning_pipeoffload.loop.pipeline_run import PipelineRun
from lightning_pipeoffload.planning.accumulation import Accumulation
from lightning_pipeoffload.runtime.groups import PipelineGroup


class BatchBackward(BackwardHooks):
    """The hooks before and after, and each microbatch's own backward in between.

    Args:
        module: The user's module.
        precision: Lightning's part of the backward, hooks included.
        run: What runs the module on this rank.
        group: The pipeline's processes.
    """

    def __init__(
        self,
        module: LightningModule,
        precision: Precision,
        run: PipelineRun,
        group: PipelineGroup,
    ) -> None:
        super().__init__(module, precision, run.pipeline.device)
        self._run = run
        self._group = group
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

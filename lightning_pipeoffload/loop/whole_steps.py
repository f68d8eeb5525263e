"""Steps that run as a whole on every rank, to which each block is lent while it runs.

Only those that do not train: one whose blocks' values decide what it does before their end cannot
be cut into stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning_pipeoffload.loop.step_calls import StepInputs, StepOutput
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.microbatch import batch_size, merge_outputs
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.step.batch_slice import BatchSlice
from lightning_pipeoffload.runtime.users_code.step_call import StepCall


class WholeSteps:
    """Runs steps on every rank alike; global rank 0's results count.

    Args:
        pipeline: This rank's part of the module.
        group: The pipeline's processes.
    """

    def __init__(self, pipeline: Pipeline, group: PipelineGroup) -> None:
        self._pipeline = pipeline
        self._group = group
        self._call = StepCall(is_last=group.is_root, is_last_local=True)

    def run(
        self,
        inputs: StepInputs,
        slices: list[BatchSlice] | None,
        weigh: Callable[[list[Any], list[int]], Sequence[Any]],
        finish_comparing: Callable[[], None],
    ) -> tuple[StepOutput, bool]:
        """Run a step with a batch.

        Args:
            inputs: The batch.
            slices: The slices of the batch, where it may turn out that the step can be cut: what it
                computes is then the same to the bit. None: it runs once.
            weigh: Returns the share of each slice in means, by the slices and their sizes.
            finish_comparing: A function that is called after the step, and refuses batches that
                differ between ranks.

        Returns:
            What the step gave, and whether it could be cut.
        """
        cuts = [(cut.part, cut.seed) for cut in slices or ()] or [(inputs.batch, inputs.seed)]
        values, could_be_cut = [], True
        for part, seed in cuts:
            lending = self._pipeline.lending(self._group.send_to_all, seed)
            with lending.running():
                values.append(inputs.step(part, self._call))
            could_be_cut &= lending.could_be_cut
        finish_comparing()
        sizes = [_size_of(part) for part, _ in cuts]
        shares = weigh([part for part, _ in cuts], sizes) if slices else [1.0]
        return self._merge(values, sizes, shares), could_be_cut

    def _merge(self, values: list[Any], sizes: list[int], shares: Sequence[Any]) -> StepOutput:
        if not self._group.is_root:
            return StepOutput(None, sizes, shares)
        whole = values[0] if len(values) == 1 else merge_outputs(values, shares)
        return StepOutput(whole, sizes, shares)


def _size_of(batch: Any) -> int:
    """Return the number of samples; 1 of what has no dimension of them."""
    try:
        return batch_size(batch)
    except ValueError:
        return 1

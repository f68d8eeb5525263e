"""The microbatches of a batch, with their records, and with their indices in a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.cut.device_reads import ReadPlace
from lightning_pipeoffload.runtime.cut.record import StepRecord
from lightning_pipeoffload.runtime.users_code.step_call import StepCall


@dataclass(eq=False)  # not frozen, which takes four times as long to make
class Microbatch:
    """One slice of a batch, and the data needed to run the step on it.

    Attributes:
        part: Its samples.
        num_samples: The number of these.
        run: Calls the user's step on it.
        record: The record of the trace of its shapes.
        device: The device of its tensors.
        seed: The seed of all its random numbers.
        index: Its number in a plan, which names it in actions (``Action.microbatch``).
        weight: Its share of the batch's loss, over the batches that accumulate; a number, or a
            tensor where the host does not know it.
        differentiate: Starts the backward from the weighted loss.
        answers: The values that the rank's stages have read from the device for it.
        is_new: Whether some dimension is larger than in all that were cut before its batch.
    """

    part: Any
    num_samples: int
    run: Callable[[StepCall], Any]
    record: StepRecord
    device: torch.device
    seed: int
    index: int = 0
    weight: float | Tensor = 1.0
    differentiate: Callable[[Tensor], None] = Tensor.backward
    answers: dict[ReadPlace, list[Any]] | None = None
    is_new: bool = False

    @property
    def has_result(self) -> bool:
        """Whether its step runs to its end; of slices only the last one's step does."""
        part = self.record.sequence_slice
        return part is None or part.is_last


def placed(
    slices: Sequence[Microbatch],
    weights: Sequence[float | Tensor] | None = None,
    differentiate: Callable[[Tensor], None] = Tensor.backward,
) -> Sequence[Microbatch]:
    """Set the indices in a plan of the microbatches of a batch, and return them.

    Args:
        slices: The microbatches.
        weights: The weight of each; None: 1.
        differentiate: Starts the backward from a weighted loss.
    """
    weights = [1.0] * len(slices) if weights is None else weights
    for index, (microbatch, weight) in enumerate(zip(slices, weights, strict=True)):
        microbatch.index, microbatch.weight = index, weight
        microbatch.differentiate = differentiate
    return slices


def in_slices(microbatches: Sequence[Microbatch], num_slices: int) -> Sequence[Microbatch]:
    """Return each microbatch once per slice of its sequences, with its index in a plan."""
    if num_slices == 1:
        return microbatches
    return [
        replace(
            whole,
            index=whole.index * num_slices + place,
            record=record,
            run=whole.run if place == num_slices - 1 else partial(_run_to_blocks, whole.run),
        )
        for whole in microbatches
        for place, record in enumerate(whole.record.in_slices(num_slices))
    ]


def _run_to_blocks(run: Callable[[StepCall], Any], call: StepCall) -> Any:
    """Run a step that exits behind the blocks; only the last slice's logging counts."""
    return run(StepCall())

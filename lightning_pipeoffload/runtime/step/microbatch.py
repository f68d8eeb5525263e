"""The microbatches of a batch, each with its step record and its index in the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.cut import ReadPlace, StepRecord
from lightning_pipeoffload.runtime.users_code import StepCall


@dataclass(eq=False)  # not frozen, which takes four times as long to make
class Microbatch:
    """A part of a batch, and the data needed to run the step on it.

    Attributes:
        part: The samples, in the structure of the batch.
        num_samples: The number of samples.
        run: Calls the user's step on ``part``, or on copies where the step writes into its batch.
        record: The record of the step traced on these shapes.
        device: The device of its tensors.
        seed: The seed from which all its random numbers are derived.
        index: The index in the plan (``Action.microbatch``).
        weight: The factor of its loss in the sum over the microbatches of an optimizer step; a
            tensor if only the device has its value.
        differentiate: Runs the backward from the weighted loss.
        read_cache: Values read from the device in an F of a stage, for the rank's other stages.
        is_new: Whether some dimension is larger than in all microbatches of earlier batches.
        of_slices: Its record for each slice of its sequences on which blocks run; all microbatches
            of a batch have as many. Empty: blocks run on whole sequences.
        has_result: Whether its step runs to the end; with sequence slices only the last slice's
            does.
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
    read_cache: dict[ReadPlace, list[Any]] | None = None
    is_new: bool = False
    of_slices: Sequence[StepRecord] = ()
    has_result: bool = True

    @property
    def num_slices(self) -> int:
        """The number of slices of its sequences."""
        return len(self.of_slices) or 1


def set_indices_and_weights(
    microbatches: Sequence[Microbatch],
    weights: Sequence[float | Tensor] | None = None,
    differentiate: Callable[[Tensor], None] = Tensor.backward,
) -> Sequence[Microbatch]:
    """Set the index in the plan and the weight of each microbatch of a batch; return them.

    Args:
        microbatches: The microbatches of the batch.
        weights: The weight of each; None: 1.
        differentiate: Runs the backward from a weighted loss.
    """
    weights = [1.0] * len(microbatches) if weights is None else weights
    for index, (microbatch, weight) in enumerate(zip(microbatches, weights, strict=True)):
        microbatch.index, microbatch.weight = index, weight
        microbatch.differentiate = differentiate
    return microbatches


def split_into_slices(microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
    """Return each microbatch once per slice of its sequences, with the indices in the plan."""
    num_slices = microbatches[0].num_slices
    if num_slices == 1:
        return microbatches
    return [
        replace(
            whole,
            index=whole.index * num_slices + place,
            record=record,
            has_result=place == num_slices - 1,
            run=whole.run if place == num_slices - 1 else partial(_run_to_blocks, whole.run),
        )
        for whole in microbatches
        for place, record in enumerate(whole.of_slices)
    ]


def _run_to_blocks(run: Callable[[StepCall], Any], call: StepCall) -> Any:
    """Run a step that exits after the blocks; only the last slice's logging counts."""
    return run(StepCall())

"""The slices of a batch: as they were traced, and as the microbatches of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.cut.record import StepRecord
from lightning_pipeoffload.runtime.users_code.step_call import StepCall


@dataclass(eq=False)  # not frozen, which takes four times as long to make
class BatchSlice:
    """One slice of a batch, and what running the step on it takes.

    Attributes:
        part: Its samples.
        num_samples: The number of these.
        run: Calls the user's step on it.
        record: What the trace of its shapes has recorded.
        device: The device of its tensors.
        seed: The seed of all its random numbers.
    """

    part: Any
    num_samples: int
    run: Callable[[StepCall], Any]
    record: StepRecord
    device: torch.device
    seed: int


@dataclass(eq=False)
class Microbatch(BatchSlice):
    """A slice in its place of a plan.

    Attributes:
        index: That place.
        weight: Its share of the batch's loss, over the batches that accumulate; a number, or a
            tensor where the host does not know it.
        differentiate: Starts the backward from the weighted loss.
    """

    index: int
    weight: float | Tensor
    differentiate: Callable[[Tensor], None]


def make_microbatches(
    slices: Sequence[BatchSlice],
    weights: Sequence[float | Tensor] | None = None,
    differentiate: Callable[[Tensor], None] = Tensor.backward,
) -> list[Microbatch]:
    """Give the slices of a batch their places in a plan.

    Args:
        slices: The slices of the batch.
        weights: The weight of each; None: 1.
        differentiate: Starts the backward from a weighted loss.
    """
    weights = [1.0] * len(slices) if weights is None else weights
    pairs = enumerate(zip(slices, weights, strict=True))
    return [
        Microbatch(
            cut.part,
            cut.num_samples,
            cut.run,
            cut.record,
            cut.device,
            cut.seed,
            index,
            weight,
            differentiate,
        )
        for index, (cut, weight) in pairs
    ]

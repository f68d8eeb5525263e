"""What the run of a batch takes, and what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepInputs:
    """One batch to run.

    Attributes:
        kind: The kind of the step: "training_step", say.
        batch: Any pytree.
        call: Calls the user's step on a microbatch.
        seed: The seed of the batch's random numbers.
    """

    kind: str
    batch: Any
    call: Callable[[Any], Any]
    seed: int


@dataclass(frozen=True)
class StepOutput:
    """What a batch gave on this rank.

    Attributes:
        value: What the user's steps returned, put together; None without the last stage.
        sizes: The number of samples of each microbatch.
    """

    value: Any
    sizes: list[int]

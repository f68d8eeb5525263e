"""What the run of a batch takes, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_pipeoffload.runtime.users_code.step_call import UsersStep


@dataclass(frozen=True)
class StepInputs:
    """One batch to run.

    Attributes:
        kind: The kind of the step: "training_step", say.
        batch: Any pytree.
        step: The user's step.
        seed: The seed of the batch's random numbers.
    """

    kind: str
    batch: Any
    step: UsersStep
    seed: int


@dataclass(frozen=True)
class StepOutput:
    """What a batch gave on this rank.

    Attributes:
        value: What the user's steps returned, put together; None without the last stage.
        sizes: The number of samples of each microbatch.
        shares: The share of each in means over the batch.
    """

    value: Any
    sizes: list[int]
    shares: Sequence[Any]

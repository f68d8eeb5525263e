"""Runs whole batches on one rank: cuts them, picks the plan that fits, executes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from lightning_pipeoffload.runtime.executor import Executor
from lightning_pipeoffload.runtime.microbatch import batch_size
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.stage import Microbatch
from lightning_pipeoffload.schedule import Schedule, forward_only, keep_microbatches, lower
from lightning_pipeoffload.settings import PipelineSettings


@dataclass(frozen=True)
class StepInputs:
    """One batch to run.

    Attributes:
        kind: of the step: "training_step", say.
        batch: any pytree.
        call: calls the user's step on a microbatch.
        seed: of the batch's random numbers.
    """

    kind: str
    batch: Any
    call: Callable[[Any], Any]
    seed: int


class StepRunner:
    """The batches of one rank.

    Args:
        pipeline: this rank's stages.
        executor: of its plans.
        settings: the strategy's.
        num_ranks: of the pipeline.

    Attributes:
        schedule: of a full training batch; a provisional one until the first batch.
    """

    def __init__(
        self, pipeline: Pipeline, executor: Executor, settings: PipelineSettings, num_ranks: int
    ) -> None:
        self._pipeline = pipeline
        self._executor = executor
        self._settings = settings
        self._num_ranks = num_ranks
        self._size: int | None = None
        self.schedule = settings.provisional_schedule(num_ranks)
        self._plan = cache(_make_plan)

    @property
    def plan(self) -> Schedule:
        """The lowered plan of a full training batch."""
        return self._plan(self.schedule, self.schedule.num_microbatches, training=True)

    def cut_training_batch(self, inputs: StepInputs) -> list[Microbatch]:
        """Cut a batch of the size of the first one, or a shorter one into fewer microbatches.

        Raises:
            ValueError: the first batch cannot be cut, or the step not at its blocks.
        """
        total = batch_size(inputs.batch)
        if self._size is None:
            count = self._settings.choose_num_microbatches(self._num_ranks, total)
            self.schedule = self._settings.make_schedule(self._num_ranks, count)
            self._size = total // count
        return self._cut(inputs, max(self._size, self._smallest_size(total)))

    def cut_evaluation_batch(self, inputs: StepInputs) -> list[Microbatch]:
        """Cut a batch of any size into at most as many microbatches as in training."""
        return self._cut(inputs, self._smallest_size(batch_size(inputs.batch)))

    def run(
        self,
        microbatches: list[Microbatch],
        training: bool,
        before_backward: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Execute; return what the user's step returned for each microbatch, on the last stage."""
        plan = self._plan(self.schedule, len(microbatches), training=training)
        return self._executor.run(plan, microbatches, before_backward)

    def weigh(self, microbatches: list[Microbatch], accumulated: int = 1) -> list[float]:
        """Set each microbatch's weight in the gradient; return its share of the batch's loss.

        Args:
            microbatches: of one batch.
            accumulated: batches whose gradients add up to one optimizer step.
        """
        weigh = self._settings.microbatch_weight
        measure = weigh if callable(weigh) else batch_size
        weights = [float(measure(microbatch.part)) for microbatch in microbatches]
        shares = [weight / sum(weights) for weight in weights]
        for microbatch, share in zip(microbatches, shares, strict=True):
            microbatch.weight = share / accumulated
        return shares

    def _smallest_size(self, total: int) -> int:
        return -(-total // self.schedule.num_microbatches)

    def _cut(self, inputs: StepInputs, size: int) -> list[Microbatch]:
        return self._pipeline.make_microbatches(
            inputs.batch, size, inputs.call, inputs.kind, inputs.seed
        )


def _make_plan(schedule: Schedule, count: int, training: bool) -> Schedule:
    kept = keep_microbatches(schedule, count) if count < schedule.num_microbatches else schedule
    return lower(kept if training else forward_only(kept))

"""What a run says of itself: what it promises before its first step, and has measured after it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning_pipeoffload.loop.auto_choice import Chosen
from lightning_pipeoffload.loop.step_boundary import StepBoundary
from lightning_pipeoffload.optimizers.kept_step import bytes_usable
from lightning_pipeoffload.optimizers.optimizer_table import measure_states
from lightning_pipeoffload.planning.figures import PlannedStep
from lightning_pipeoffload.planning.limits import MachineLimits
from lightning_pipeoffload.planning.measurements import Measurements
from lightning_pipeoffload.planning.memory_needs import MemoryNeeds, add_step_copies, describe_needs
from lightning_pipeoffload.planning.report import (
    predict,
    print_accumulation,
    print_choice,
    print_measurement,
    print_offload,
    print_prediction,
)
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.planning.training_plan import TrainingPlan
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.step.batch_slice import BatchSlice
from lightning_pipeoffload.schedule import Schedule

log = logging.getLogger(__name__)

_NO_ESTIMATE = "what training needs of memory is not known before it runs: %s"


class RunReport:
    """Describes a run; what is printed comes from the one process that reports.

    Attributes:
        needs: What stages need by their shapes; None before that is known, and where it is not.
        chosen: What ``schedule="auto"`` has come to; None where a schedule was named.
        size: Samples of a microbatch; 0 before the first batch.
        boundary: What keeps steps so that they can be taken back; None before a run.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        pipeline: Pipeline,
        training: TrainingPlan,
        measurements: Measurements,
        group: PipelineGroup,
    ) -> None:
        self._settings = settings
        self._pipeline = pipeline
        self._training = training
        self._measurements = measurements
        self._group = group
        self.needs: MemoryNeeds | None = None
        self.chosen: Chosen | None = None
        self.size = 0
        self.boundary: StepBoundary | None = None

    def estimate_memory(self, first: BatchSlice, optimizers: Sequence[Any]) -> None:
        """Find out what training will need, without values; all ranks call it, before they split.

        Args:
            first: The first microbatch.
            optimizers: The user's optimizers.
        """
        try:
            num_sharing = self._settings.num_sharing(self._group.num_replicas)
            states = measure_states(optimizers)
            self.needs = MemoryNeeds.of(self._pipeline, first, states, num_sharing)
        except Exception as error:  # the user's own code, which may not go without values
            log.info(_NO_ESTIMATE, f"{type(error).__name__}: {error}".splitlines()[0])

    def make(self, live_bytes: bool = False) -> dict[str, Any]:
        """Describe the pipeline; see ``PipeOffloadStrategy.report``.

        Args:
            live_bytes: Whether to add the long lists of what was kept over the last step.

        Raises:
            RuntimeError: There was no batch yet, and the first one decides how the module is cut.
        """
        if not self._pipeline.stages:
            raise RuntimeError("there is nothing to report before the first batch")
        plan = self._training.plan
        barrier = self._training.has_barrier()
        report = predict(plan, self._pipeline, self._training.costs, barrier)
        report["num_replicas"] = self._group.num_replicas
        report["memory"] = self._memory(plan)
        report["steps_taken_back"] = self.boundary.num_taken_back if self.boundary else 0
        if self.chosen is not None:
            tried = self.chosen.plan.candidates if self.chosen.plan is not None else ()
            report["candidates"] = [candidate.figures() for candidate in tried]
        if self._training.offloaded is not None:
            report["offload"] = asdict(self._training.offloaded)
        measured = self._measurements.report()
        if measured is not None:
            report["measured"] = dict(measured)
            if not live_bytes:
                del report["measured"]["live_bytes"]
            num_samples = plan.num_microbatches * self.size * self._group.num_replicas
            seconds = max(filter(None, measured["step_seconds"]))
            report["samples_per_second"] = num_samples / seconds
        return report

    def _memory(self, plan: Schedule) -> dict[str, list[int]] | None:
        if self.needs is None:
            return None
        memory = describe_needs(self.needs.of_ranks(plan))
        if self.boundary is not None and self.boundary.keeps_copies:
            add_step_copies(memory, self.needs.copied(plan), bytes_usable(self._pipeline.device))
        return memory

    def print_start(self, num_accumulated: int) -> None:
        """Print what is going to run.

        Args:
            num_accumulated: Batches whose gradients add up to one optimizer step.
        """
        if self._group.reports:
            if self.chosen is not None and self.chosen.plan is not None:
                print_choice(self.chosen.plan, self.chosen.is_measured)
            print_prediction(self.make())
            if num_accumulated > 1:
                print_accumulation(num_accumulated, self._training.schedule.num_microbatches)

    def print_plan(self, limits: MachineLimits) -> None:
        """Print the plan that was made with measured costs, for what the machines have."""
        if self._group.reports:
            print_offload(self.make(), self._settings.limit_on(limits.device))

    def print_end(self) -> None:
        """Bring the measurements of all ranks together, and print them; all ranks call it."""
        if self._measurements.end_training(self._training.may_copy) and self._group.reports:
            costs = self._measurements.costs_at_end
            assert costs is not None
            step = PlannedStep(self._training.plan, costs, self._training.has_barrier())
            print_measurement(self.make(), step.timeline.peak_memory, step.bubble)

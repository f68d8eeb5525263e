"""The description of a run: predicted before its first step, and measured after it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from lightning_pipeoffload.loop.auto_choice import Chosen
from lightning_pipeoffload.loop.step_boundary import StepBoundary
from lightning_pipeoffload.optimizers.optimizer_snapshot import bytes_usable
from lightning_pipeoffload.optimizers.optimizer_table import may_step_by_bucket, measure_states
from lightning_pipeoffload.planning.balance import describe_cut
from lightning_pipeoffload.planning.figures import PlannedStep
from lightning_pipeoffload.planning.limits import MachineLimits
from lightning_pipeoffload.planning.measurements import Measurements
from lightning_pipeoffload.planning.memory_needs import (
    HostedOptimizer,
    MemoryNeeds,
    add_step_copies,
    describe_needs,
)
from lightning_pipeoffload.planning.report import (
    predict,
    print_accumulation,
    print_choice,
    print_line,
    print_measurement,
    print_offload,
    print_prediction,
    print_reads,
)
from lightning_pipeoffload.planning.training_plan import TrainingPlan
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.step.microbatch import Microbatch
from lightning_pipeoffload.schedule import Schedule

log = logging.getLogger(__name__)

_NO_ESTIMATE = "the memory that training needs is not known before it runs: %s"


class RunReport:
    """Describes a run; one process of all prints.

    Attributes:
        needs: The memory that stages need by their shapes; None while that is not known.
        chosen: The decision of ``schedule="auto"``; None where a schedule was named.
        size: Samples of a microbatch; 0 before the first batch.
        boundary: What takes steps back; None before a run.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        training: TrainingPlan,
        measurements: Measurements,
    ) -> None:
        self._pipeline = pipeline
        self._training = training
        self._measurements = measurements
        self._group = pipeline.group
        self.needs: MemoryNeeds | None = None
        self.chosen: Chosen | None = None
        self.size = 0
        self.boundary: StepBoundary | None = None

    def estimate_memory(self, first: Microbatch, optimizers: Sequence[Any]) -> None:
        """Compute from shapes the memory that training needs; all ranks call it."""
        settings = self._training.current.settings
        try:
            num_sharing = settings.num_sharing(self._group.num_replicas)
            has_masters = settings.master_weights is not None
            states = measure_states(optimizers, has_masters)
            needs = MemoryNeeds.of(self._pipeline, first, states, num_sharing)
            if settings.optimizer_offload:
                by_bucket = all(map(may_step_by_bucket, optimizers))
                needs = replace(needs, hosted=HostedOptimizer(by_bucket, has_masters))
            self.needs = needs
        except Exception as error:  # the user's own code, which may not go without values
            log.info(_NO_ESTIMATE, f"{type(error).__name__}: {error}".splitlines()[0])

    def make(self, live_bytes: bool = False) -> dict[str, Any]:
        """Describe the pipeline; see ``PipeOffloadStrategy.report``."""
        if not self._pipeline.stages:
            raise RuntimeError("there is nothing to report before the first batch")
        plan = self._training.plan
        barrier = self._training.has_barrier()
        report = predict(plan, self._pipeline, self._training.current.costs, barrier)
        report["num_replicas"] = self._group.num_replicas
        report["memory"] = self._memory(plan)
        report["steps_taken_back"] = self._num_taken_back
        reads = self._pipeline.records.device_reads.items()
        report["device_reads"] = [{"part": part, "line": line} for line, part in reads]
        if self.chosen is not None:
            tried = self.chosen.plan.candidates if self.chosen.plan is not None else ()
            report["candidates"] = [candidate.figures() for candidate in tried]
            report["num_block_classes"] = self.chosen.num_classes
        if self._training.current.offloaded is not None:
            report["offload"] = asdict(self._training.current.offloaded)
        measured = self._measurements.report()
        if measured is not None:
            report["measured"] = dict(measured)
            if not live_bytes:
                del report["measured"]["live_bytes"]
            num_samples = plan.num_microbatches * self.size * self._group.num_replicas
            seconds = max(filter(None, measured["step_seconds"]))
            report["samples_per_second"] = num_samples / seconds
        return report

    @property
    def _num_taken_back(self) -> int:
        return 0 if self.boundary is None else self.boundary.validation.num_taken_back

    def _memory(self, plan: Schedule) -> dict[str, list[int]] | None:
        if self.needs is None:
            return None
        memory = describe_needs(self.needs.of_ranks(plan))
        if self.boundary is not None and self.boundary.validation.is_on:
            add_step_copies(memory, self.needs.copied(plan), bytes_usable(self._pipeline.device))
        return memory

    def print_start(self, num_accumulated: int) -> None:
        """Print the plan, and how many batches accumulate for an optimizer step."""
        if self._group.reports:
            if self.chosen is not None and self.chosen.plan is not None:
                print_choice(self.chosen.plan, self.chosen.is_measured)
            report = self.make()
            print_prediction(report)
            if self._group.num_ranks > 1:
                print_line(describe_cut(report, self._pipeline))
            if self._pipeline.device.type != "cpu":
                print_reads(report["device_reads"])
            if num_accumulated > 1:
                print_accumulation(num_accumulated, self._training.schedule.num_microbatches)

    def print_plan(self, limits: MachineLimits) -> None:
        """Print the plan that was made with measured costs, within these limits."""
        if self._group.reports:
            print_offload(self.make(), self._training.current.settings.limit_on(limits.device))

    def print_end(self) -> None:
        """Gather the measurements of all ranks, and print them; all ranks call it."""
        if self._measurements.end_training(self._training.may_copy) and self._group.reports:
            costs = self._measurements.costs_at_end
            assert costs is not None
            step = PlannedStep(self._training.plan, costs, self._training.has_barrier())
            print_measurement(self.make(), step.timeline.peak_memory, step.bubble)

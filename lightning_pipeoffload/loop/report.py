"""The description of a run: predicted before its first step, and measured after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from lightning_pipeoffload.loop.batch_cutter import BatchCutter
from lightning_pipeoffload.loop.plans import Plans
from lightning_pipeoffload.optimizers import bytes_usable
from lightning_pipeoffload.planning.balance import describe_cut
from lightning_pipeoffload.planning.figures import PlannedStep
from lightning_pipeoffload.planning.measurements import Measurements
from lightning_pipeoffload.planning.memory_needs import add_snapshot_bytes, describe_needs
from lightning_pipeoffload.planning.report import (
    predict_figures,
    print_accumulation_advice,
    print_choice,
    print_host_syncs,
    print_line,
    print_measurement,
    print_offload,
    print_prediction,
    print_unlike_devices,
)
from lightning_pipeoffload.planning.run_plans import rank_limits
from lightning_pipeoffload.runtime.batch import tokens_in
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.runtime.step import Microbatch
from lightning_pipeoffload.schedule import Schedule, device_indices


class Report:
    """Describes the fits of a module that is cut; one process of all prints."""

    def __init__(
        self,
        pipeline: Pipeline,
        plans: Plans,
        measurements: Measurements,
        cutter: BatchCutter,
    ) -> None:
        self._pipeline, self._group = pipeline, pipeline.group
        self._plans, self._training = plans, plans.training
        self._measurements, self._cutter = measurements, cutter
        self._num_samples = 0  # of batches that have tokens
        self._num_tokens: int | Tensor = 0

    def add_batch_tokens(self, batch: Any, microbatches: Sequence[Microbatch]) -> None:
        """Count the tokens of a training batch, for the mean of a sample."""
        num_tokens = tokens_in(batch)
        if num_tokens is not None:
            self._num_tokens += num_tokens
            self._num_samples += sum(each.num_samples for each in microbatches)

    def make(self, live_bytes: bool = False) -> dict[str, Any]:
        """Describe the pipeline; see ``PipeOffloadStrategy.report``."""
        if not self._pipeline.stages:
            raise RuntimeError("there is nothing to report before the first batch")
        plan = self._training.plan
        barrier = self._training.has_barrier()
        report = predict_figures(plan, self._pipeline, self._training.current.costs, barrier)
        report["num_replicas"] = self._group.num_replicas
        report["memory"] = self._memory(plan)
        report["devices"] = self._devices(plan)
        report["steps_taken_back"] = self._num_taken_back
        reads = self._pipeline.records.device_reads.items()
        report["device_reads"] = [{"part": part, "line": line} for line, part in reads]
        chosen, offloaded = self._plans.chosen, self._training.current.offloaded
        if chosen is not None:
            tried = chosen.plan.candidates if chosen.plan is not None else ()
            report["candidates"] = [candidate.report_row() for candidate in tried]
            report["num_block_classes"] = chosen.num_classes
            order = chosen.better_order
            report["better_order"] = None if order is None else asdict(order)
        if offloaded is not None:
            report["offload"] = asdict(offloaded)
        measured = self._measurements.report()
        if measured is not None:
            report["measured"] = dict(measured)
            if not live_bytes:
                del report["measured"]["live_bytes"]
            num_microbatches = plan.num_microbatches * self._group.num_replicas
            num_samples = num_microbatches * self._cutter.microbatch_size
            seconds = max(filter(None, measured["step_seconds"]))
            report["samples_per_second"] = num_samples / seconds
            if self._num_samples:
                of_sample = float(self._num_tokens) / self._num_samples
                report["tokens_per_second"] = report["samples_per_second"] * of_sample
        return report

    @property
    def _num_taken_back(self) -> int:
        boundary = self._plans.boundary
        return 0 if boundary is None else boundary.validation.num_taken_back

    def _devices(self, plan: Schedule) -> list[dict[str, Any]]:
        """Return the device of each rank, in pipeline order."""
        devices, current = self._group.devices, self._training.current
        of_places = current.settings.device_limits(plan.num_ranks, current.limits.devices)
        return [
            {
                "device": place,
                "name": devices.names[place],
                "slowness": devices.slowness[place],
                "memory_limit": None if of_places is None else of_places[place],
            }
            for place in device_indices(plan.placement)
        ]

    def _memory(self, plan: Schedule) -> dict[str, list[int]] | None:
        needs, boundary = self._plans.needs, self._plans.boundary
        if needs is None:
            return None
        memory = describe_needs(needs.needs_by_rank(plan))
        if boundary is not None and boundary.validation.is_on:
            add_snapshot_bytes(
                memory, needs.snapshot_bytes(plan), bytes_usable(self._pipeline.device)
            )
        return memory

    def print_initial_plan(self, num_accumulated: int) -> None:
        """Print the plan, and how many batches accumulate for an optimizer step."""
        if self._group.is_global_zero:
            chosen = self._plans.chosen
            if chosen is not None and chosen.plan is not None:
                print_choice(chosen.plan, chosen.is_measured)
            report = self.make()
            print_prediction(report)
            if self._group.num_ranks > 1:
                print_line(describe_cut(report, self._pipeline))
            print_unlike_devices(report)
            if self._pipeline.device.type != "cpu":
                print_host_syncs(report["device_reads"])
            if num_accumulated > 1:
                print_accumulation_advice(num_accumulated, self._training.schedule.num_microbatches)

    def print_measured_plan(self) -> None:
        """Print the plan that was made with measured costs, and its limit."""
        if self._group.is_global_zero:
            current = self._training.current
            limits = rank_limits(current.settings, current.limits, current.schedule.placement)
            print_offload(self.make(), None if limits is None else limits.limits)

    def print_measurements(self) -> None:
        """Gather the measurements of all ranks, and print them; all ranks call it."""
        if self._measurements.gather_final(self._training.may_copy) and self._group.is_global_zero:
            costs = self._measurements.costs_at_end
            assert costs is not None
            step = PlannedStep(self._training.plan, costs, self._training.has_barrier())
            print_measurement(self.make(), step.timeline.peak_memory, step.bubble)

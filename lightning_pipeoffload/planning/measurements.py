"""Measured costs of steps, and the memory that machines have left, of one rank and of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_pipeoffload.pictures import MeasuredStep, RankStep, join_rank_steps
from lightning_pipeoffload.planning.limits import DeviceMemory, MachineLimits, reserve_memory
from lightning_pipeoffload.planning.report import join_measurements, read_rank_figures
from lightning_pipeoffload.runtime.device import ActionTimer, TimedStep, make_lanes
from lightning_pipeoffload.runtime.measure import (
    CopySpeed,
    RankCosts,
    costs_of_pipelines,
    join_costs,
    measure_clock_offsets,
    measure_copy_speed,
    measure_latencies,
    median_costs,
)
from lightning_pipeoffload.runtime.run import Executor, Ledger, Pipeline
from lightning_pipeoffload.runtime.whole import WholeRuns
from lightning_pipeoffload.schedule import Costs, Schedule, device_indices

# The first microbatch allocates and warms caches; the median of three excludes it.
_STEPS_TO_MEASURE = 3
_NO_COPIES = CopySpeed(float("inf"), float("inf"), 1.0)


class Measurements:
    """The measurements of this rank; the ``gather`` methods are called by all ranks, between steps.

    Args:
        executor: Runs this rank's actions.
        pipeline: This rank's part of the module.
        step_seconds: Returns the seconds of this rank's optimizer step on the host.
        whole_runs: Runs of steps that are not cut, and in hooks.

    Attributes:
        costs_at_end: Costs of all ranks' stages, once training has ended; None before.
    """

    def __init__(
        self,
        executor: Executor,
        pipeline: Pipeline,
        step_seconds: Callable[[], float],
        whole_runs: WholeRuns,
    ) -> None:
        self._executor, self._step_seconds = executor, step_seconds
        self._pipeline, self._whole_runs = pipeline, whole_runs
        self._group = pipeline.group
        self._latencies: dict[int, float] = {}
        self._at_end: dict[str, list[Any]] | None = None
        self.costs_at_end: Costs | None = None

    @property
    def _num_slices(self) -> int:
        return self._pipeline.settings.num_sequence_slices  # evaluations run whole sequences

    @property
    def has_run(self) -> bool:
        """Whether a step has run, so that parameters, gradients and optimizer states are there."""
        return self._executor.timer.num_steps > 0

    @property
    def is_plan_due(self) -> bool:
        """Whether the first steps have just been measured, by which to plan those that follow."""
        return self._executor.timer.num_steps == _STEPS_TO_MEASURE

    @property
    def has_measured_plan(self) -> bool:
        """Whether the plan in use has been measured."""
        return self._executor.timer.num_steps >= _STEPS_TO_MEASURE

    def gather_costs(self, schedule: Schedule, may_copy: bool = True) -> Costs:
        """Return the costs of all ranks' stages, with P2P latencies, and copies if ``may_copy``."""
        self._latencies = measure_latencies(self._executor, schedule, self._pipeline.device)
        return costs_of_pipelines(self._group.gather_from_pipelines(self._costs(may_copy)))

    def gather_step(self, step: TimedStep) -> tuple[MeasuredStep, float] | None:
        """Gather the last step of all ranks, which wait for each other and for their accelerators.

        Returns:
            On the root the step in times of its clock, and the seconds by which these may err; None
            elsewhere.
        """
        offsets = measure_clock_offsets(self._group)
        read, error = self._executor.timer.clock.host_time_converter()
        ranks = self._group.gather(
            (read_step_times(step, self._executor.memory.ledger, read), error)
        )
        if offsets is None:
            return None
        pairs = list(zip(ranks, offsets, strict=True))
        on_one_clock = [times.earlier_by(offset.seconds) for (times, _), offset in pairs]
        measured = join_rank_steps(on_one_clock, step.num_slices)
        return measured, max(error_of_rank + offset.error for (_, error_of_rank), offset in pairs)

    def gather_limits(
        self, keeps_device_limit: bool, bytes_without_activations: int | None = None
    ) -> MachineLimits:
        """Return the memory that all ranks' hosts have, and devices if a plan has to keep that.

        Args:
            keeps_device_limit: Whether it has.
            bytes_without_activations: The most that this rank's device has held apart from
                activations; None: in the steps that are measured.
        """
        memory = self._executor.memory
        if bytes_without_activations is None:
            bytes_without_activations = memory.peak_without_activations
        found = (
            DeviceMemory.of(self._pipeline.device),
            bytes_without_activations,
            memory.settings.host.budget,
        )
        pipelines = self._group.gather_from_pipelines(found)
        ranks = device_indices(self._group.stage_ranks)
        budgets = [pipelines[0][rank][2] for rank in ranks]
        devices = self._group.devices
        names = () if devices.have_one_name else devices.names
        if not keeps_device_limit:
            return MachineLimits(None, budgets, names)
        of_all = [own for pipeline in pipelines for own, _, _ in pipeline]
        of_ranks = [
            min(max(0, own.plannable_bytes(of_all) - other) for own, other, _ in replicas)
            for replicas in zip(*pipelines, strict=True)
        ]
        if not names:
            # Where devices are alike, all have the limit of that with most apart from activations.
            return MachineLimits([min(of_ranks)] * len(ranks), budgets)
        return MachineLimits([of_ranks[rank] for rank in ranks], budgets, names)

    def reserve_memory(self, limit: int | None) -> None:
        """Take the memory of plans before more than a microbatch is in flight.

        Only where messages are kernels, for which a later wait for the device would wait.

        Args:
            limit: Bytes for activations and what waits for W; None: what plans use of the device.
        """
        memory, device = self._executor.memory, self._pipeline.device
        own = DeviceMemory.of(device)
        if own is None or not self._executor.transport.has_kernels:
            return
        # Gathered before any rank takes its part, or a rank on the same device would measure less.
        most = own.plannable_bytes(self._group.world.gather(own))
        if limit is not None:
            most = min(most, memory.peak_without_activations + limit)
        if reserve_memory(device, most - own.reserved):
            memory.reset_peaks()

    def reset_for_new_plan(self, num_copy_lanes: int) -> None:
        """Measure another plan from now on, with ``num_copy_lanes`` copy lanes."""
        device = self._pipeline.device
        self._executor.set_timer(ActionTimer(device))
        self._executor.memory.reset_peaks()
        self._executor.memory.use_lanes(make_lanes(device, num_copy_lanes))

    def gather_final(self, may_copy: bool) -> bool:
        """Gather the measurements of all ranks; False: there are none."""
        if not self._executor.timer.num_steps:
            return False
        ranks = self._group.gather((self._rank_figures(), self._costs(may_copy)))
        self._at_end = join_measurements([mine for mine, _ in ranks])
        self.costs_at_end = join_costs(costs for _, costs in ranks)
        return True

    def report(self) -> dict[str, list[Any]] | None:
        """Return the measurements of each rank, other ranks' None before the end of training."""
        if self._at_end is not None or not self._executor.timer.num_steps:
            return self._at_end
        mine = self._rank_figures()
        missing = dict.fromkeys(mine)
        ranks = range(self._group.num_ranks)
        return join_measurements([mine if rank == self._group.rank else missing for rank in ranks])

    def _rank_figures(self) -> dict[str, Any]:
        remote_bytes = self._whole_runs.peak_remote_bytes
        return read_rank_figures(self._executor, self._pipeline.weight_flops, remote_bytes)

    def copy_speed(self, may_copy: bool) -> CopySpeed:
        """Return how fast this rank copies while all others do; all ranks call it."""
        if not may_copy:
            return _NO_COPIES
        # Of all replicas: devices that share a link to the host then copy at once.
        return measure_copy_speed(self._pipeline.device, meet=self._group.world.barrier)

    def _costs(self, may_copy: bool) -> RankCosts:
        speed = self.copy_speed(may_copy)
        costs = median_costs(self._executor, speed, self._latencies, self._num_slices)
        return replace(costs, step=self._step_seconds())


def read_step_times(step: TimedStep, ledger: Ledger, read: Callable[[Any], float]) -> RankStep:
    """Read the times of a step; actions that ran as one get equal shares, in their order.

    Args:
        step: The last step of a rank.
        ledger: The memory that the rank has recorded in it.
        read: Returns the host's time of an event.
    """
    counts: dict[int, int] = {}
    actions = []
    for action, spans, shared_by in step.actions:
        index = counts.get(id(spans), 0)
        counts[id(spans)] = index + 1
        times = [(read(start), read(end)) for start, end in spans]
        actions.append((action, [_share(*span, index, shared_by) for span in times]))
    held = [(entry.action, float(entry.held.device)) for entry in ledger.entries]
    return RankStep(actions, held)


def _share(start: float, end: float, index: int, count: int) -> tuple[float, float]:
    seconds = (end - start) / count
    return start + index * seconds, start + (index + 1) * seconds

"""Costs of any cut, by measured blocks, each on its rank's device and within its limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace

from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.cut import NO_MEMORY_LIMITS, Stage, StageMemoryLimits
from lightning_pipeoffload.runtime.measure import (
    ActionOverhead,
    costs_of_stages,
    cut_by_costs,
    move_head_w_to_b,
)
from lightning_pipeoffload.runtime.run import Pipeline
from lightning_pipeoffload.schedule import (
    Costs,
    PlanOption,
    ScheduleError,
    compute_seconds,
    device_indices,
)

ByRecompute = Mapping[tuple[str, int], tuple[Costs, ActionOverhead]]


class CutCosts:
    """Costs of any cut, from measured blocks; or of the first cut, from operations and shapes.

    Attributes:
        by_recompute: Costs of each segment, and what of them counts once in a stage; or of each
            stage of the first cut; by recomputation and number of microbatches.
        is_measured: Whether they are of blocks, in seconds.
        limits: The memory limit of the device at each place, once it is known; None: any.
        weights: Bytes of each segment's parameters, gradients and optimizer states, where limits
            are what unlike devices have left; else ().
        taken: Bytes of them on the device at each place that these limits allow for already.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        by_recompute: ByRecompute,
        settings: PipelineSettings,
        is_measured: bool,
    ) -> None:
        self._pipeline = pipeline
        self._partition = list(pipeline.cut.stages)
        self._placement = tuple(pipeline.settings.stage_ranks)
        self._num_ranks = max(self._placement) + 1
        self.by_recompute, self._split, self.is_measured = by_recompute, settings.split, is_measured
        self._is_in_w = settings.head_weight_grad_choices[0] == "W"  # as it was measured
        self._devices = pipeline.group.devices
        self.limits: Sequence[float] | None = None
        self.weights: Sequence[float] = ()
        self.taken: Sequence[float] = ()
        self._stages: dict[PlanOption, Sequence[Stage]] = {}

    @property
    def has_head(self) -> bool:
        """Whether weight gradients of the head are known apart from those of its stage."""
        if not self.is_measured:
            return False
        costs, _ = next(iter(self.by_recompute.values()))
        return costs.per_stage("weight_residue", len(self._pipeline.chain) + 1)[-1] > 0

    def covers(self, option: PlanOption) -> bool:
        if self.is_measured:
            return option.num_chunks * self._num_ranks <= len(self._pipeline.chain)
        return option.placement(self._num_ranks) == self._placement

    def stages(self, option: PlanOption) -> Sequence[Stage]:
        if not self.is_measured:
            return self._partition
        if option not in self._stages:
            placement, costs = option.placement(self._num_ranks), self._measured_costs(option)[0]
            slowness = self._devices.slowness_per_stage(placement)
            memory_limits = self._stage_memory_limits(option, costs)
            arguments = self._pipeline, costs, placement, self._split, slowness, memory_limits
            self._stages[option] = cut_by_costs(*arguments)
        return self._stages[option]

    def _stage_memory_limits(self, option: PlanOption, costs: Costs) -> StageMemoryLimits:
        """Return the memory of stages by an option's cut; see :class:`PlanOption`."""
        if not option.num_kept or self.limits is None:
            return NO_MEMORY_LIMITS
        placement = option.placement(self._num_ranks)
        places = device_indices(placement)
        limits = [
            (self.limits[place] + (self.taken[place] if self.taken else 0.0)) / option.num_chunks
            for place in (places[rank] for rank in placement)
        ]
        sizes = costs.per_stage("activation", len(self._pipeline.chain) + 1)
        return StageMemoryLimits(
            sizes, limits, option.max_live_by_stage(self._num_ranks), self.weights
        )

    def memory_without_activations(self, option: PlanOption) -> float | Sequence[float]:
        """Return what each rank's weights in an option's cut take more than the limits allow for.

        0 where limits are given, or go by the smallest device.
        """
        if not self.weights:
            return 0.0
        placement = option.placement(self._num_ranks)
        memory = [-self.taken[place] for place in device_indices(placement)]
        for stage in self.stages(option):
            memory[placement[stage.index]] += sum(self.weights[s] for s in stage.segments)
        return memory

    def add_cut_variants(self, wanted: Sequence[PlanOption]) -> list[PlanOption]:
        """Return options, and with other cuts where a cut by times may not fit unlike devices."""
        is_free = self._split == "auto" and self.is_measured
        if self.limits is None or not is_free:
            return [*wanted]
        if len({*self.limits}) == 1 and self._devices.are_equally_fast:
            return [*wanted]
        found = []
        for option in wanted:
            cuts = [replace(option, num_kept=count) for count in (0, self._num_ranks, 1)]
            known: list[Sequence[Stage]] = []
            for each in cuts:
                with suppress(ScheduleError):
                    if self.stages(each) not in known:
                        known.append(self.stages(each))
                        found.append(each)
        return found

    def reordered(self, places: Sequence[int]) -> CutCosts:
        """Return the costs on the same devices in another order; see :meth:`.Devices.reordered`."""
        other = copy(self)
        other._devices, other._stages = self._devices.reordered(places), {}
        other.limits = None if self.limits is None else [self.limits[place] for place in places]
        other.taken = [self.taken[place] for place in places] if self.taken else ()
        return other

    def busiest_rank_seconds(self, option: PlanOption) -> float:
        """Return the seconds for which the busiest rank computes a microbatch."""
        placement = option.placement(self._num_ranks)
        work = [0.0] * self._num_ranks
        seconds = compute_seconds(self.costs_of(option), len(placement))
        for of_stage, rank in zip(seconds, placement, strict=True):
            work[rank] += of_stage
        return max(work)

    def costs_of(self, option: PlanOption) -> Costs:
        costs, overhead = self._measured_costs(option)
        if not self.is_measured:
            return costs
        stages = self.stages(option)
        if option.head_weight_grad == "B" and self._is_in_w:
            costs = move_head_w_to_b(costs, len(self._pipeline.chain) + 1)
        of_stages = costs_of_stages(costs, stages, overhead)
        slowness = self._devices.slowness_per_stage(option.placement(self._num_ranks))
        return of_stages.scale_compute_times(slowness) if slowness else of_stages

    def _measured_costs(self, option: PlanOption) -> tuple[Costs, ActionOverhead]:
        return self.by_recompute[option.recompute, option.num_microbatches]

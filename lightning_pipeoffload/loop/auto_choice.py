"""What ``schedule="auto"`` stands for in a run: chosen before the first step, by measured costs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from lightning_pipeoffload.loop.choice_cache import ChoiceCache
from lightning_pipeoffload.loop.compilation import compile_ahead
from lightning_pipeoffload.loop.hooks.users_hooks import find_hooked
from lightning_pipeoffload.loop.microbatches import sees_its_size
from lightning_pipeoffload.loop.step_calls import StepInputs
from lightning_pipeoffload.optimizers.optimizer_table import measure_states
from lightning_pipeoffload.planning.limits import MachineLimits
from lightning_pipeoffload.planning.measurements import Measurements
from lightning_pipeoffload.planning.memory_needs import MemoryNeeds
from lightning_pipeoffload.planning.plan_request import plan_for_all, request_for
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.cut.partition import Stage
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.measure.block_costs import (
    BlockMeasurement,
    costs_of_stages,
    cut_by_costs,
    join_costs,
)
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.step.batch_slice import BatchSlice
from lightning_pipeoffload.runtime.users_code.step_call import copy_part
from lightning_pipeoffload.schedule import Costs, ScheduleError
from lightning_pipeoffload.schedule.candidates import Option, options
from lightning_pipeoffload.schedule.make_plan import Plan

log = logging.getLogger(__name__)

_NOT_MEASURED = "blocks are not measured one by one, their operations count: %s"
_WAYS = ("none", "cheap", "full")

Blocks = Mapping[tuple[str, int], Costs]
"""What each block costs, by what the backward computes again and the number of microbatches."""

CutBatch = Callable[[int], list[BatchSlice]]
"""Cuts the first batch into so many microbatches."""


@dataclass(frozen=True)
class Chosen:
    """What a run goes by.

    Attributes:
        settings: The settings, with a schedule by its name.
        plan: The plan that was chosen; None where nothing was evaluated.
        limits: What the machines have.
        is_measured: Whether the costs are in seconds.
    """

    settings: PipelineSettings
    plan: Plan | None = None
    limits: MachineLimits = field(default_factory=MachineLimits)
    is_measured: bool = False

    def costs_with(self, needs: MemoryNeeds | None) -> Costs:
        """Return the costs with the memory of these stages as shapes tell it, where they do."""
        assert self.plan is not None
        if needs is None:
            return self.plan.costs
        names = ("activation", "weight_input", "weight_residue")
        return replace(self.plan.costs, **{name: getattr(needs.costs, name) for name in names})


class AutoChoice:
    """Chooses for one run; all ranks do what it says, in the same order.

    Args:
        settings: The strategy's settings.
        pipeline: This rank's part of the module, in the first cut.
        group: The pipeline's processes, in the places of the first cut.
        measurements: What tells how fast copies are, and what the machines have.
        has_step_barrier: Whether all ranks wait for each other between two optimizer steps.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        pipeline: Pipeline,
        group: PipelineGroup,
        measurements: Measurements,
        has_step_barrier: bool,
    ) -> None:
        self._settings = settings
        self._pipeline = pipeline
        self._group = group
        self._measurements = measurements
        self._has_step_barrier = has_step_barrier

    def choose(self, inputs: StepInputs, num_microbatches: int, batch_size: int) -> Chosen:
        """Measure the blocks, and choose the fastest plan that fits.

        Args:
            inputs: The first batch.
            num_microbatches: Slices of it.
            batch_size: Its samples.

        Raises:
            ValueError: The step cannot be cut.
            ScheduleError: No plan keeps the memory limit.
        """
        if self._group.num_ranks == 1:
            return self._by_default(num_microbatches)

        def cut_batch(count: int) -> list[BatchSlice]:
            copied, size = copy_part(inputs.batch), batch_size // count
            return self._pipeline.cut_batch(copied, size, inputs.step, inputs.kind, inputs.seed)

        first = cut_batch(num_microbatches)[0]
        self._shared = self._pipeline.shared_segments()
        cache = ChoiceCache(
            self._settings, self._pipeline, num_microbatches, self._has_step_barrier
        )
        if torch.are_deterministic_algorithms_enabled():
            found = self._group.world.broadcast(cache.find() if self._group.reports else None, 0)
            if found is None:
                return self._by_default(num_microbatches)
            return Chosen(replace(self._settings, **found))
        chosen = self._decide(*self._know(cut_batch, first, num_microbatches, batch_size))
        if chosen.plan is not None and self._group.reports:
            cache.store(chosen.plan.best, chosen.settings)
        return chosen

    def _know(
        self, cut_batch: CutBatch, first: BatchSlice, num_microbatches: int, batch_size: int
    ) -> tuple[_KnownCosts, MachineLimits]:
        """Return what is known of the costs of cuts, and what the machines have."""
        counts = [num_microbatches]
        more = self._settings.more_microbatches(num_microbatches, batch_size)
        if more and not sees_its_size(self._pipeline):
            counts.append(more)
        compile_ahead(self._pipeline, self._group)
        blocks = self._measure(cut_batch, counts)
        limits = self._limits()
        if blocks is not None:
            return _OfBlocks(self._pipeline, blocks, self._settings), limits
        cut_batch(num_microbatches)  # the first cut, which counts then
        counted = {(self._settings.recompute, num_microbatches): self._count(first)}
        return _OfFirstCut(self._pipeline, counted), limits

    def _count(self, first: BatchSlice) -> Costs:
        """Return what the stages of the first cut cost by their operations, memory by shapes."""
        try:
            return MemoryNeeds.of(self._pipeline, first).costs
        except Exception as error:  # the user's own code, which may not go without values
            self._say(f"{type(error).__name__}: {error}".splitlines()[0])
            return self._pipeline.costs

    def _by_default(self, num_microbatches: int) -> Chosen:
        name = self._settings.default_schedule
        return Chosen(replace(self._settings, schedule=name, num_microbatches=num_microbatches))

    def _measure(self, cut_batch: CutBatch, counts: Sequence[int]) -> Blocks | None:
        """Return what each block costs in each way that may be of use; None: there is no telling.

        Where a hook of the user's would see what is measured, nothing is.
        """
        obstacle = "configure_model has made each rank its part" if self._pipeline.is_split else ""
        hook = find_hooked(self._pipeline.module)
        obstacle = obstacle or (hook and f"{hook} has a hook, which would see more microbatches")
        if not self._group.world.agree(not obstacle, unanimous=True):
            self._say(obstacle)
            return None
        speed = self._measurements.copy_speed(self._may_copy)
        trial = BlockMeasurement(self._pipeline, self._group.transport)
        found = {}
        for way, count in product(self._ways(), counts):
            try:
                own = trial.measure(partial(cut_batch, count), way, speed)
            except ScheduleError as error:
                self._say(str(error).partition("\n")[0])
                return None
            found[way, count] = join_costs(self._group.gather(own))
        return self._group.replicas.first(found)

    def _say(self, obstacle: str) -> None:
        if self._group.reports:
            log.info(_NOT_MEASURED, obstacle)

    def _ways(self) -> Sequence[str]:
        """Without a limit to keep, recomputing is for nothing."""
        given = self._settings.recompute
        return _WAYS if given == "none" and self._is_limited else (given,)

    @property
    def _is_limited(self) -> bool:
        return self._settings.is_limited(self._pipeline.device.type != "cpu")

    @property
    def _may_copy(self) -> bool:
        return self._is_limited or self._settings.offload not in ("auto", "none")

    def _limits(self) -> MachineLimits:
        keeps = self._settings.keeps_device_limit(self._pipeline.device.type != "cpu")
        limits = self._measurements.gather_limits(keeps)
        if limits.device is None:
            return limits
        return replace(limits, device=max(0.0, limits.device - self._state_bytes()))

    def _state_bytes(self) -> float:
        """Return what optimizers will keep on a rank, which has nothing of it yet."""
        trainer: Any = self._pipeline.module.trainer
        num_sharing = self._settings.num_sharing(self._group.num_replicas)
        states = measure_states(trainer.optimizers)
        return sum(states.values()) / (self._group.num_ranks * num_sharing)

    def _decide(self, known: _KnownCosts, limits: MachineLimits) -> Chosen:
        wanted = [
            option
            for way, count in known.blocks
            for option in options([count], None, self._num_chunks, [way])
            if known.takes(option, self._group)
        ]
        has_barrier = partial(self._has_barrier, known)
        given = self._settings, self._group.num_ranks, wanted, known.costs_of, limits
        plan = plan_for_all(self._group, request_for(*given, has_barrier))
        option = plan.best.option
        settings = replace(
            self._settings,
            schedule=option.schedule,
            num_chunks=option.num_chunks,
            num_microbatches=option.num_microbatches,
            recompute=option.recompute,
            split=known.split(option),
        )
        return Chosen(settings, plan, limits, known.is_measured)

    def _has_barrier(self, known: _KnownCosts, option: Option) -> bool:
        """Whether its ranks wait for each other, be it because several own weights that are tied.

        These are on the first and the last stage: where one waits for the other, all follow.
        """
        if self._has_step_barrier or not self._shared:
            return self._has_step_barrier
        placement, stages = option.placement(self._group.num_ranks), known.stages(option)
        owners = (
            {placement[stage.index] for stage in stages if stage.segments & shared}
            for shared in self._shared
        )
        return any(len(ranks) > 1 for ranks in owners)

    @property
    def _num_chunks(self) -> int | None:
        wanted = self._settings.num_chunks
        return wanted if isinstance(wanted, int) else None


class _OfBlocks:
    """Costs of any cut, from measured blocks."""

    is_measured = True

    def __init__(self, pipeline: Pipeline, blocks: Blocks, settings: PipelineSettings) -> None:
        self._pipeline = pipeline
        self.blocks = blocks
        self._split = settings.split
        self._num_ranks = max(pipeline.settings.stage_ranks) + 1

    def takes(self, option: Option, group: PipelineGroup) -> bool:
        return option.num_chunks * group.num_ranks <= len(self._pipeline.chain)

    def _blocks(self, option: Option) -> Costs:
        return self.blocks[option.recompute, option.num_microbatches]

    def stages(self, option: Option) -> Sequence[Stage]:
        placement = option.placement(self._num_ranks)
        return cut_by_costs(self._pipeline, self._blocks(option), placement, self._split)

    def split(self, option: Option) -> list[int]:
        return [len(stage.blocks) for stage in self.stages(option)]

    def costs_of(self, option: Option) -> Costs:
        return costs_of_stages(self._blocks(option), self.stages(option))


class _OfFirstCut:
    """Costs of the cut that there is, from its operations and shapes."""

    is_measured = False

    def __init__(self, pipeline: Pipeline, blocks: Blocks) -> None:
        self._partition = list(pipeline.partition)
        self._placement = pipeline.settings.stage_ranks
        self.blocks = blocks

    def takes(self, option: Option, group: PipelineGroup) -> bool:
        return option.placement(group.num_ranks) == tuple(self._placement)

    def stages(self, option: Option) -> Sequence[Stage]:
        return self._partition

    def split(self, option: Option) -> list[int]:
        return [len(stage.blocks) for stage in self._partition]

    def costs_of(self, option: Option) -> Costs:
        return self.blocks[option.recompute, option.num_microbatches]


_KnownCosts = _OfBlocks | _OfFirstCut

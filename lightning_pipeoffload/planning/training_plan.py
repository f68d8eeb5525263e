"""The plan that one rank's batches run by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from lightning_pipeoffload.planning.limits import MachineLimits
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.runtime.run import Executor
from lightning_pipeoffload.schedule import (
    Costs,
    Kind,
    OffloadReport,
    Schedule,
    add_final_actions,
    add_final_actions_by_cost,
    forward_only,
    keep_microbatches,
    lower,
    serialize_microbatches,
    steady_period,
)

# A change of plan synchronizes the ranks, so it must gain this share of the period.
_LEAST_GAIN = 0.01


def is_worth_changing(before: float, after: float) -> bool:
    """Whether a plan of ``after`` seconds replaces one of ``before``."""
    return after <= before * (1 - _LEAST_GAIN)


@dataclass(frozen=True)
class Accumulation:
    """A batch among those whose gradients add up to one optimizer step; each has a plan.

    Attributes:
        num_batches: How many there are.
        is_first: Whether gradients are set to zero before this batch's backward.
        is_last: Whether the optimizer steps after it.
        gradient_hooks: Hooks of the user that may read gradients in between.
    """

    num_batches: int = 1
    is_first: bool = True
    is_last: bool = True
    gradient_hooks: tuple[str, ...] = ()


@dataclass(frozen=True)
class CurrentPlan:
    """The plan in use, and what it was made by; another one replaces it as a whole.

    Attributes:
        settings: The strategy's settings; once ``schedule="auto"`` is decided with the schedule's
            name, its microbatches, stages, split and recomputation.
        schedule: The schedule of a full training batch; before the first batch, with a provisional
            number of microbatches.
        costs: The measured costs by which it was planned; None before there are any.
        offloaded: The report on the schedule's offload, if one was planned.
        limits: The memory of the machines that it has to keep.
    """

    settings: PipelineSettings
    schedule: Schedule
    costs: Costs | None = None
    offloaded: OffloadReport | None = None
    limits: MachineLimits = field(default_factory=MachineLimits)


class TrainingPlan:
    """The plan in use, and its lowered forms.

    Args:
        settings: The strategy's settings.
        num_ranks: The number of ranks of the pipeline.
        executor: The executor of this rank.
        on_accelerator: Whether the ranks' devices have a memory of their own.
        final_kind: Returns what begins with the final gradients of each stage: REDUCE, STEP or
            nothing.
        has_barrier: Whether no rank begins a step before all have ended the one before; known once
            the module is cut.

    Attributes:
        current: The plan in use; it is replaced between two steps.
        is_cold: Whether the shapes of the current batch are new on an accelerator. It runs one
            microbatch at a time then: compiling, loading and allocating wait for all queued work of
            the device, which would be a deadlock between ranks with several microbatches.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        num_ranks: int,
        executor: Executor,
        on_accelerator: bool,
        has_barrier: Callable[[], bool] = lambda: False,
        final_kind: Callable[[], Kind | None] = lambda: None,
    ) -> None:
        self.current = CurrentPlan(settings, settings.provisional_schedule(num_ranks))
        self._executor = executor
        self._on_accelerator = on_accelerator
        self.is_cold = False
        self.has_barrier, self.final_kind = has_barrier, final_kind
        self._lowered = cache(_lower)
        self._used: tuple[Schedule, tuple[int, int], Kind | None, Schedule] | None = None

    @property
    def schedule(self) -> Schedule:
        """The schedule of a full training batch."""
        return self.current.schedule

    @property
    def plan(self) -> Schedule:
        """The lowered plan of a full training batch."""
        counts = self.schedule.num_microbatches, self.schedule.num_sequence_slices
        return self._lower_if_changed(self.schedule, counts, steps=True)

    def period(self, schedule: Schedule, costs: Costs) -> float:
        """Return the seconds from one step to the next, with a barrier where this run has one."""
        plan = add_final_actions_by_cost(schedule, costs, self.steps_early)
        return steady_period(plan, costs, self.has_barrier())

    @property
    def steps_early(self) -> bool:
        """Whether an optimizer on the host steps as gradients become final."""
        return self.final_kind() is Kind.STEP

    @property
    def may_copy(self) -> bool:
        """Whether activations go to the host, or may once costs are known."""
        return self.current.settings.may_offload(self._on_accelerator) or self.schedule.has_copies

    def lower_for_evaluation(self, num_microbatches: int) -> Schedule:
        """Return the lowered plan of the forwards of ``num_microbatches`` microbatches."""
        return self._lowered(self._order, num_microbatches, 1, training=False)

    def lower_for_training(self, num_microbatches: int, num_slices: int, steps: bool) -> Schedule:
        """Return the lowered plan of a batch.

        Args:
            num_microbatches: Its microbatches, as many as the schedule has or fewer.
            num_slices: The slices of each, as many as the schedule has or fewer.
            steps: Whether the optimizer steps after it.
        """
        return self._lower_if_changed(self._order, (num_microbatches, num_slices), steps)

    def _lower_if_changed(self, order: Schedule, counts: tuple[int, int], steps: bool) -> Schedule:
        final_kind = self.final_kind() if steps else None
        # By identity: a lookup by actions is slow.
        used = self._used
        if used is None or used[0] is not order or used[1:3] != (counts, final_kind):
            plan = self._lowered(order, *counts, training=True, final_kind=final_kind)
            used = self._used = order, counts, final_kind, plan
        return used[3]

    @property
    def _order(self) -> Schedule:
        return serialize_microbatches(self.schedule) if self.is_cold else self.schedule

    def replace(self, current: CurrentPlan) -> None:
        """Use another plan from now on; every rank calls it before the first action of a batch."""
        self.current = current

    def prepare_for_batch(
        self, shapes_are_new: bool, estimate: Costs, has_fewer_slices: bool = False
    ) -> None:
        """Prepare for a batch, before it runs.

        Args:
            shapes_are_new: Whether some are larger than in earlier batches.
            estimate: Used in place of costs that are not measured yet.
            has_fewer_slices: Whether its microbatches have fewer slices than the schedule.
        """
        self.is_cold = shapes_are_new and self._on_accelerator
        self._executor.memory.set_measure_all(self.is_cold)
        current = self.current
        costs = current.costs or estimate
        if has_fewer_slices:
            costs = replace(costs, slices=None)
        self._executor.set_message_limits(current.schedule, costs)
        # A larger microbatch may break the limit: what each of these keeps is measured.
        is_measured = shapes_are_new and current.settings.is_limited(self._on_accelerator)
        for stage in self._executor.stages.values():
            stage.set_measure_all(is_measured)


def _lower(
    schedule: Schedule,
    count: int,
    num_slices: int,
    training: bool,
    final_kind: Kind | None = None,
) -> Schedule:
    has_all = (count, num_slices) == (schedule.num_microbatches, schedule.num_sequence_slices)
    kept = schedule if has_all else keep_microbatches(schedule, count, num_slices)
    plan = lower(kept if training else forward_only(kept))
    return plan if final_kind is None else add_final_actions(plan, final_kind)

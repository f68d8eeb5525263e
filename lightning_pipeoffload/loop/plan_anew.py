"""The plan of a run made anew, for stages and microbatches that stay as they are.

What ``schedule="auto"`` stands for may be any family of the same placement, but none that is
searched for by seconds, for training waits. A schedule that was named keeps its name: its order and
what it offloads are made by the new costs. The numbers that a step adds up stay in their order, so
that losses are those of a run whose plan stays.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from lightning_pipeoffload.planning.machine_limits import MachineLimits
from lightning_pipeoffload.planning.memory_plan import MemoryPlan, keeps_limits, limits_of_plans
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.planning.training_plan import TrainingPlan, is_worth_changing
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.schedule import (
    SCHEDULES,
    Costs,
    Schedule,
    ScheduleError,
    sums_alike,
)
from lightning_pipeoffload.schedule.candidates import Option, options
from lightning_pipeoffload.schedule.evaluation import evaluate

log = logging.getLogger(__name__)

_NONE_FITS = (
    "measured anew, the plan in use keeps no memory limit, and none would: %s; training goes on "
    "with the plan in use"
)


class Anew(NamedTuple):
    """What has come of it.

    Attributes:
        settings: The settings of the new plan; None where that in use stays.
        before: Seconds of a step by the plan that was in use, with the new costs.
        after: The same by the new plan; None where there is no better one.
    """

    settings: PipelineSettings | None
    before: float
    after: float | None


class PlanAnew:
    """Makes it on one rank; all ranks do the same in the same order.

    Args:
        pipeline: This rank's part of the module.
        group: The run's processes.
        training: The plan of training.
        may_rename: Whether another family may be taken.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        group: PipelineGroup,
        training: TrainingPlan,
        may_rename: bool,
    ) -> None:
        self._pipeline, self._group = pipeline, group
        self._training, self._may_rename = training, may_rename

    def make(self, settings: PipelineSettings, costs: Costs, limits: MachineLimits) -> Anew:
        """Adopt the plan for these costs if it is better, or if that in use keeps no limit now.

        Args:
            settings: The settings in use.
            costs: What stages have come to cost, in seconds and bytes.
            limits: The limits of the machines.
        """
        chosen = self._rename(settings, costs, limits) if self._may_rename else settings
        before = self._training.period(self._training.schedule, costs)
        found = self._find(chosen, costs, limits, before)
        self._training.count_by(settings if found is None else chosen, costs, limits)
        if found is None:
            return Anew(None, before, None)
        plan, offloaded = found
        self._training.adopt(plan, costs, offloaded)
        return Anew(chosen, before, self._training.period(plan, costs))

    def _rename(
        self, settings: PipelineSettings, costs: Costs, limits: MachineLimits
    ) -> PipelineSettings:
        """Return the settings with the best family for the cut, as one rank finds it."""
        name = None
        if self._group.reports:
            try:
                keep = limits_of_plans(settings, limits)
                best = evaluate(
                    self._options(settings),
                    self._group.num_ranks,
                    lambda option: costs,
                    keep,
                    has_barrier=lambda option: self._training.has_barrier(),
                ).best
                name = best.option.schedule
            except ScheduleError:
                pass  # which is told of where the plan is made
        name = self._group.world.broadcast(name, 0)
        return settings if name is None else replace(settings, schedule=name)

    def _options(self, settings: PipelineSettings) -> list[Option]:
        used = self._training.schedule
        sizes = [used.num_microbatches], None, used.num_chunks, [settings.recompute]
        return [
            option
            for option in options(*sizes)
            if option.placement(used.num_ranks) == used.placement
            and not SCHEDULES[option.schedule].takes_seconds
        ]

    def _find(
        self, settings: PipelineSettings, costs: Costs, limits: MachineLimits, before: float
    ) -> MemoryPlan | None:
        """Return a plan that is worth changing to from the one in use, whose period is given."""
        used, limit = self._training.schedule, settings.limit_on(limits.device)
        try:
            found = self._training.plan_by(settings, costs, limits)
        except ScheduleError as error:
            if self._group.reports and not keeps_limits(used, costs, limit, limits):
                log.warning(_NONE_FITS, str(error).partition("\n")[0])
            return None
        if found[0] == used or not self._adds_up_alike(used, found[0]):
            return None
        after = self._training.period(found[0], costs)
        gains = is_worth_changing(before, after)
        return found if gains or not keeps_limits(used, costs, limit, limits) else None

    def _adds_up_alike(self, used: Schedule, found: Schedule) -> bool:
        by_weight: dict[int, frozenset[int]] = {}
        for name, stages in self._pipeline.ownership.owners.items():
            key = self._pipeline.tensors.identity[name]
            by_weight[key] = by_weight.get(key, frozenset()) | stages
        return sums_alike(used, found, by_weight.values())

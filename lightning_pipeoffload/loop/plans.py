"""The plans of a run: chosen before the first step, made anew by what steps measure.

All ranks do the same in the same order; a plan is made on one and sent to all. No rank waits while
the plan stays: reasons for another one are sent after a batch, read a batch later, and lead to a
new plan before the next batch that starts a step::

    first batch    choose()        by the settings, or by measured blocks
    fourth batch   update_plan()   anew, by what three steps have cost
    later batches  flags() -> of all ranks -> update_plan()    anew, or the solver's
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning_pipeoffload.loop.auto_choice import AutoChoice, ScheduleChoice
from lightning_pipeoffload.loop.exchange import Flags
from lightning_pipeoffload.loop.microbatches import least_samples
from lightning_pipeoffload.loop.solver_search import SolverSearch
from lightning_pipeoffload.loop.step_boundary import StepBoundary
from lightning_pipeoffload.loop.step_calls import StepInputs
from lightning_pipeoffload.optimizers import estimate_state_bytes, may_step_by_bucket
from lightning_pipeoffload.planning.limits import MachineLimits
from lightning_pipeoffload.planning.measurements import Measurements
from lightning_pipeoffload.planning.memory_needs import MemoryNeeds, StandInTraits
from lightning_pipeoffload.planning.report import print_outgrown_plan
from lightning_pipeoffload.planning.run_plans import (
    build_first_schedule,
    keeps_limits,
    make_plan_on_all_ranks,
    request_for_run,
)
from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.planning.training_plan import (
    CurrentPlan,
    TrainingPlan,
    is_worth_changing,
)
from lightning_pipeoffload.runtime.run import Executor, Pipeline
from lightning_pipeoffload.runtime.step import Microbatch
from lightning_pipeoffload.schedule import (
    FAMILIES,
    Costs,
    Kind,
    Plan,
    PlanOption,
    PlanRequest,
    Schedule,
    ScheduleError,
    accumulates_in_same_order,
    options,
)

log = logging.getLogger(__name__)

_NO_ESTIMATE = "the memory that training needs is not known before it runs: %s"
_NONE_FITS = (
    "measured anew, the plan in use keeps no memory limit, and none would: %s; training goes on "
    "with the plan in use"
)


class Plans:
    """Makes the plans of one module's fits.

    Attributes:
        training: The plan in use.
        chosen: The decision of ``schedule="auto"``; None where a schedule was named.
        needs: The memory that stages need by their shapes; None while that is not known.
        boundary: What ranks wait for between steps; None before the first fit.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        pipeline: Pipeline,
        executor: Executor,
        measurements: Measurements,
    ) -> None:
        self._pipeline, self._executor = pipeline, executor
        group = pipeline.group
        self._group, self._measurements = group, measurements
        self._on_accelerator = pipeline.device.type != "cpu"
        self.boundary: StepBoundary | None = None
        self.training = TrainingPlan(
            settings,
            group.num_ranks,
            executor,
            self._on_accelerator,
            self._has_barrier,
            self._final_kind,
        )
        self.needs: MemoryNeeds | None = None
        self._search = SolverSearch(group, self.training, measurements, self._replace)
        self._flags = Flags()
        self._largest: dict[str, dict[int, int]] = {}
        self.chosen: ScheduleChoice | None = None
        self._has_measured_steps = False
        self._has_reserved_memory = False
        self._is_solved = settings.uses_solver

    @property
    def settings(self) -> PipelineSettings:
        """The settings of the plan in use."""
        return self.training.current.settings

    def set_boundary(self, boundary: StepBoundary) -> None:
        """Plan for the steps of another fit or evaluation."""
        self.boundary = boundary

    def _has_barrier(self) -> bool:
        """Whether the ranks wait for each other at a step's end, be it for tied weights.

        These are on the first and the last stage: where one waits for the other, all follow.
        """
        return self._has_step_barrier or bool(self._pipeline.tensors.sharing_rank_sets())

    @property
    def _has_step_barrier(self) -> bool:
        return self.boundary is not None and self.boundary.has_barrier()

    def _final_kind(self) -> Kind | None:
        if self._group.num_replicas > 1:
            return Kind.REDUCE
        may_step = self.boundary is not None and self.boundary.may_step_early
        return Kind.STEP if may_step and self.settings.optimizer_offload else None

    def choose(
        self,
        inputs: StepInputs,
        total: int,
        is_packed: bool,
        cut: Callable[[StepInputs, int], list[Microbatch]],
    ) -> int:
        """Make the plan of the first steps.

        Args:
            inputs: The first batch.
            total: Its samples; 0: they are not counted, since ``make_microbatches`` cuts it.
            is_packed: Whether each of its rows is a microbatch.
            cut: Cuts it into as many microbatches, to measure them.

        Returns:
            The number of microbatches that the batch is cut into.
        """
        least = least_samples(self._pipeline.module)
        sizes = self._group.num_ranks, total, least, is_packed
        settings, chooses_schedule = self.settings, self.settings.chooses_schedule
        count = settings.choose_num_microbatches(*sizes)
        if chooses_schedule:
            run = self._pipeline, self._measurements
            choice = AutoChoice(settings, *run, cut, self._has_step_barrier)
            self.chosen = choice.choose(inputs, count, total)
            settings = self.chosen.settings
            count = settings.choose_num_microbatches(*sizes)
        schedule, offloaded = build_first_schedule(
            settings, self._group.num_ranks, count, self._on_accelerator
        )
        self.training.replace(CurrentPlan(settings, schedule, offloaded=offloaded))
        if chooses_schedule and not self._pipeline.is_split:
            self._group.assign_stages(schedule)
            self._pipeline.prepare_new_cut(self._group.rank, settings.cut_settings(self._group))
            self._executor.set_rank(self._group.rank, self._group.transport)
        return count

    def estimate_memory(
        self, first: Microbatch, optimizers: Sequence[Any], metric_bytes: int
    ) -> None:
        """Compute from shapes the memory that training needs; all ranks call it.

        Args:
            first: The first microbatch.
            optimizers: The optimizers.
            metric_bytes: Bytes that a microbatch keeps for metrics until the batch's end.
        """
        settings = self.settings
        try:
            num_optimizer_shards = settings.num_optimizer_shards(self._group.num_replicas)
            has_masters = settings.master_weights is not None
            states = estimate_state_bytes(optimizers, has_masters)
            needs = MemoryNeeds.of(self._pipeline, first, states, num_optimizer_shards)
            count = self.training.schedule.num_microbatches
            needs = needs.add_to_last_stage(2 * count * metric_bytes)  # parts, and joined
            on_host = settings.optimizer_offload
            if on_host or has_masters:
                by_bucket = all(map(may_step_by_bucket, optimizers))
                needs = replace(needs, stand_ins=StandInTraits(by_bucket, has_masters, on_host))
            self.needs = needs
        except Exception as error:  # the user's own code, which may not go without values
            log.info(_NO_ESTIMATE, f"{type(error).__name__}: {error}".splitlines()[0])

    def plan_first_step(self) -> None:
        """Make the plan of the first step with the costs that it was chosen by; all ranks call it.

        The memory of these stages, computed from shapes, replaces that of measured blocks.
        """
        self._executor.memory.reset_peaks()  # an evaluation before training took others
        if self.chosen is None or self.chosen.plan is None or not self.chosen.is_measured:
            return
        costs = self.chosen.costs_with(self.needs)
        self._plan_named_schedule(costs, self.chosen.limits)

    def _plan_named_schedule(self, costs: Costs, limits: MachineLimits) -> None:
        """Plan the schedule that the settings name, by these costs and limits."""
        option = self.settings.option(self.training.schedule.num_microbatches)
        request = self._request([option], costs, limits)
        self._use_plan(self.settings, make_plan_on_all_ranks(self._group, request), limits)

    def _request(
        self, options: Sequence[PlanOption], costs: Costs, limits: MachineLimits
    ) -> PlanRequest:
        has_barrier = self.training.has_barrier
        request = PlanRequest(
            self._group.num_ranks,
            options,
            lambda option: costs,
            has_barrier=lambda option: has_barrier(),
            steps_early=self.training.steps_early,
        )
        return request_for_run(self.settings, request, limits)

    def _use_plan(self, settings: PipelineSettings, plan: Plan, limits: MachineLimits) -> None:
        """Run by a plan from now on, and measure it anew."""
        self._replace(CurrentPlan(settings, plan.schedule, plan.costs, plan.report, limits))

    def _replace(self, current: CurrentPlan) -> None:
        assert current.costs is not None
        self.training.replace(current)
        self._measurements.reset_for_new_plan(current.costs.copy_lanes)

    def update_plan(self, is_first: bool) -> bool:
        """Change the plan if there is reason to; all ranks call it before the actions of a batch.

        Args:
            is_first: Whether gradients start to add up anew.

        Returns:
            Whether the plan was made by the first steps.
        """
        if not self._has_reserved_memory and self._measurements.has_run:
            self._has_reserved_memory = True
            given = self.settings.device_limits(self._group.num_ranks)
            limit = None if given is None else int(given[self._group.device_place])
            self._measurements.reserve_memory(limit)
        if not self._has_measured_steps and self._measurements.is_plan_due:
            return self._plan_by_measurement()
        if is_first:
            flags, self._flags = self._flags, Flags()
            if flags.exceeds_planned_memory:
                self._plan_anew()
            elif flags.has_solver_result:
                self._search.adopt_solver_plan()
        return False

    def flags(self, stops: bool, due_clocks: int) -> Flags:
        """Return this rank's flags after a batch; see :class:`Flags`."""
        has_plan = self._has_measured_steps and self.training.current.costs is not None
        is_limited = has_plan and self.settings.is_limited(self._on_accelerator)
        has_solver_result = self._is_solved and self._search.has_result
        return Flags(
            stops, is_limited and self._exceeds_planned_memory(), has_solver_result, due_clocks
        )

    def merge_flags(self, flags: Flags) -> None:
        """Keep what any rank has sent until the next batch."""
        self._flags = self._flags.merged(flags)

    def _exceeds_planned_memory(self) -> bool:
        """Whether a microbatch needs more memory here than planned, and that does not fit."""
        stages = self._executor.stages
        memories = {index: [*stage.memories.values()] for index, stage in stages.items()}
        largest = {
            "activation": {i: sum(m.all_bytes for m in of) for i, of in memories.items()},
            "weight_input": {
                i: sum(m.weight_input_bytes or 0 for m in of) for i, of in memories.items()
            },
            "weight_residue": {
                i: sum(m.residue_bytes or 0 for m in of) for i, of in memories.items()
            },
        }
        current = self.training.current
        costs, limits = current.costs, current.limits
        if largest == self._largest or costs is None:
            return False
        self._largest = largest
        num_stages = current.schedule.num_stages
        planned = {name: list(costs.per_stage(name, num_stages)) for name in largest}
        most: dict[str, Any] = {
            name: [max(size, largest[name].get(i, 0)) for i, size in enumerate(sizes)]
            for name, sizes in planned.items()
        }
        grown = replace(costs, **most)
        return most != planned and not keeps_limits(
            current.schedule, grown, current.settings, limits
        )

    def _plan_anew(self) -> None:
        self._search.close()
        costs = self._measurements.gather_costs(self.training.schedule, self.training.may_copy)
        limits = self._gather_limits()
        after = self._adopt_better(costs, limits)
        if self._group.is_global_zero:
            print_outgrown_plan(self.training.schedule.name, after)
        if self._is_solved:
            self._search.start(costs, limits)

    def _adopt_better(self, costs: Costs, limits: MachineLimits) -> float | None:
        """Adopt the best plan for these costs if it is faster, or if the one in use breaks a limit.

        ``schedule="auto"`` may take any family of the same placement but those that search for
        seconds, for training waits. A schedule that was named stays. The numbers that a step adds
        up stay in their order, so that losses are those of a run whose plan stays.

        Returns:
            Seconds of a step by the new plan; None where the plan in use stays.
        """
        used = self.training.schedule
        keeps_limit = keeps_limits(used, costs, self.settings, limits)
        before = self.training.period(used, costs)
        self.training.replace(replace(self.training.current, costs=costs, limits=limits))
        request = self._request(self._options(), costs, limits)
        try:
            plan = make_plan_on_all_ranks(self._group, request)
        except ScheduleError as error:
            if self._group.is_global_zero and not keeps_limit:
                log.warning(_NONE_FITS, str(error).partition("\n")[0])
            return None
        if plan.schedule == used or not self._sums_in_same_order(plan.schedule):
            return None
        after = self.training.period(plan.schedule, costs)
        if keeps_limit and not is_worth_changing(before, after):
            return None
        settings = replace(self.settings, schedule=plan.best.option.schedule)
        self._use_plan(settings, plan, limits)
        return after

    def _options(self) -> list[PlanOption]:
        """Return the options that the plan in use may be changed to."""
        used = self.training.schedule
        if self.chosen is None:
            return [self.settings.option(used.num_microbatches)]
        heads = self.settings.head_weight_grad_choices[:1]
        sizes = [used.num_microbatches], None, used.num_chunks, [self.settings.recompute], heads
        return [
            option
            for option in options(*sizes, num_sequence_slices=used.num_sequence_slices)
            if option.placement(used.num_ranks) == used.placement
            and not FAMILIES[option.schedule].takes_seconds
        ]

    def _sums_in_same_order(self, schedule: Schedule) -> bool:
        by_weight: dict[int, frozenset[int]] = {}
        for name, stages in self._pipeline.tensors.owners.items():
            key = self._pipeline.tensors.identity[name]
            by_weight[key] = by_weight.get(key, frozenset()) | stages
        return accumulates_in_same_order(self.training.schedule, schedule, by_weight.values())

    def _plan_by_measurement(self) -> bool:
        """Make the plan anew with what the first steps cost, and measure that one from now on.

        Returns whether that plan may differ.

        The ranks wait for each other here, once. What was chosen by measured blocks stays where
        nothing is better, for by other costs its family may not fit.
        """
        self._has_measured_steps = True
        training = self.training
        if not (training.may_copy or training.steps_early or self._is_solved):
            return False
        costs = self._measurements.gather_costs(self.training.schedule)
        limits = self._gather_limits()
        if self._is_solved:
            self._search.start(costs, limits)
        elif self.chosen is not None and self.chosen.is_measured:
            self._adopt_better(costs, limits)
        else:
            self._plan_named_schedule(costs, limits)
        return True

    def _gather_limits(self) -> MachineLimits:
        heeds_devices = self.settings.keeps_device_limit(self._on_accelerator)
        return self._measurements.gather_limits(heeds_devices)

    def leave(self) -> None:
        """Leave the plan that runs, after an error in the middle of a step too."""
        self._search.close()
        self._flags = Flags()
        self._executor.abandon()

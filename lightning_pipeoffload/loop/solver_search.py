"""Better plans that a solver finds while training goes on."""

from __future__ import annotations

from collections.abc import Callable

from lightning_pipeoffload.planning.limits import MachineLimits, bytes_formatter
from lightning_pipeoffload.planning.measurements import Measurements
from lightning_pipeoffload.planning.report import print_gain
from lightning_pipeoffload.planning.run_plans import keeps_limits, rank_limits
from lightning_pipeoffload.planning.training_plan import (
    CurrentPlan,
    TrainingPlan,
    is_worth_changing,
)
from lightning_pipeoffload.runtime.comm import PipelineGroup
from lightning_pipeoffload.schedule import (
    Costs,
    MemoryLimitError,
    Schedule,
    ScheduleError,
)
from lightning_pipeoffload.schedule.solver import PlanProblem, PlanSolver, best_of_families


class SolverSearch:
    """Better plans that a solver finds while training goes on, adopted between two steps.

    The solver is a process next to global rank 0's. Where it has news all ranks wait for each
    other, measure, and decide by the same numbers.

    Args:
        group: The processes of the run.
        training: The plan in use.
        measurements: What its actions cost.
        replace: Replaces the plan in use, and measures the new one.
    """

    def __init__(
        self,
        group: PipelineGroup,
        training: TrainingPlan,
        measurements: Measurements,
        replace: Callable[[CurrentPlan], None],
    ) -> None:
        self._group, self._training, self._measurements = group, training, measurements
        self._replace = replace
        self._solver: PlanSolver | None = None
        self._problem: PlanProblem | None = None
        self._to_beat = 0.0

    def start(self, costs: Costs, limits: MachineLimits) -> None:
        """Run by the best plan of the families, and search for better ones; all ranks call it.

        The solver starts from a plan that has W apart from B everywhere.
        """
        used, settings = self._training.schedule, self._training.current.settings
        of_ranks = rank_limits(settings, limits, used.placement)
        self._problem = problem = PlanProblem(
            used.num_microbatches,
            used.placement,
            costs if of_ranks is None else of_ranks.scale_to_common_limit(costs),
            None if of_ranks is None else of_ranks.common_limit,
            self._training.has_barrier(),
        )
        try:
            start = self._find_start_plan(problem)
        except MemoryLimitError as error:
            assert of_ranks is not None
            refused = of_ranks.error_of_tightest_rank(error, costs, limits.names)
            raise ScheduleError(refused.message(bytes_formatter(settings.memory_limit))) from None
        self._use_schedule(start, costs, limits)
        if not settings.solver_seconds:
            return
        self._to_beat = problem.seconds(start)
        if self._group.is_global_zero:
            self._solver = PlanSolver(
                problem, start, settings.solver_seconds, settings.cache_folder
            )

    def _use_schedule(self, schedule: Schedule, costs: Costs, limits: MachineLimits) -> None:
        settings = self._training.current.settings
        self._replace(CurrentPlan(settings, schedule, costs, limits=limits))

    def _find_start_plan(self, problem: PlanProblem) -> Schedule:
        """Return the families' best plan for a problem, found on one process for all."""
        found: Schedule | MemoryLimitError | None = None
        if self._group.is_global_zero:
            try:
                found = best_of_families(problem)
            except MemoryLimitError as error:
                found = error
        found = self._group.world.broadcast(found, 0)
        if isinstance(found, MemoryLimitError):
            raise found
        assert found is not None
        return found

    @property
    def has_result(self) -> bool:
        """Whether the solver of this rank has a better plan for what was measured, or has ended."""
        if self._solver is None or not self._measurements.has_measured_plan:
            return False
        self._solver.poll()
        return self._better_plan is not None or self._solver.has_exited

    @property
    def _better_plan(self) -> Schedule | None:
        """The solver's plan, if it is better than the one in use and all that were compared."""
        if self._solver is None or self._solver.best is None or self._problem is None:
            return None
        is_better = is_worth_changing(self._to_beat, self._problem.seconds(self._solver.best))
        return self._solver.best if is_better else None

    def adopt_solver_plan(self) -> None:
        """Send the plan to all ranks, which decide on it by what was measured last."""
        has_exited = self._solver is not None and self._solver.has_exited
        plan, has_exited = self._group.world.broadcast((self._better_plan, has_exited), 0)
        if plan is not None and self._problem is not None:
            self._to_beat = self._problem.seconds(plan)
            costs = self._measurements.gather_costs(self._training.schedule)
            if self._is_worth_adopting(plan, costs):
                self._use_schedule(plan, costs, self._training.current.limits)
        if has_exited:
            self.close()

    def _is_worth_adopting(self, plan: Schedule, costs: Costs) -> bool:
        assert self._problem is not None
        before = self._training.period(self._training.schedule, costs)
        after = self._training.period(plan, costs)
        current = self._training.current
        fits = keeps_limits(plan, costs, current.settings, current.limits)
        if not fits or not is_worth_changing(before, after):
            return False
        if self._group.is_global_zero:
            print_gain(before, after)
        return True

    def close(self) -> None:
        """End the solver, if this rank has it."""
        if self._solver is not None:
            self._solver.close()
            self._solver = None

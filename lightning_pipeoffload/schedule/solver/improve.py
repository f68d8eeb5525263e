"""Improves a plan for some seconds, from the best start that there is."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from ..actions import ScheduleError
from ..schedule import Schedule
from ..validate import validate
from .plan_model import PlanModel, SolverLimits
from .plan_problem import PlanProblem
from .starts import best_start
from .whole_costs import WholeCosts

__all__ = ["Improvement"]

_ENOUGH = 1 + 1e-6  # times what no plan is faster than


class Improvement:
    """The best plan so far of a problem.

    Args:
        problem: What the plan is for.
        start: A plan that keeps the limit, with B and W apart.
        on_better: Called with every plan that is better than all before.

    Attributes:
        plan: The best plan.
        seconds: How long it takes.
        is_final: Whether none is shorter, as far as times are told apart.
    """

    def __init__(
        self,
        problem: PlanProblem,
        start: Schedule,
        on_better: Callable[[Schedule], None] = lambda plan: None,
    ) -> None:
        self._problem, self._on_better = problem, on_better
        self.plan, self.seconds = start, problem.seconds(start)
        self._enough = problem.lower_bound * _ENOUGH
        self.is_final = self.seconds <= self._enough

    def go_on(self, seconds: float) -> None:
        """Look for better plans.

        Args:
            seconds: What it may take.
        """
        deadline = monotonic() + seconds
        self._consider(best_start(self._problem, self.plan))
        if self.is_final or monotonic() >= deadline:
            return
        costs = self._problem.costs
        whole = WholeCosts.of(costs, self._problem.placement, self._problem.memory_limit)
        model = PlanModel(whole, costs, self.plan, self._problem.has_barrier)
        left = deadline - monotonic()
        if left > 0 and model.solve(SolverLimits(left), self._consider):
            self.is_final = True

    def _consider(self, plan: Schedule) -> bool:
        """Take a plan if it is better, by its real costs; return whether to go on."""
        if self._is_right(plan):
            seconds = self._problem.seconds(plan)
            if seconds < self.seconds:
                self.plan, self.seconds = plan, seconds
                self.is_final = seconds <= self._enough
                self._on_better(plan)
        return not self.is_final

    def _is_right(self, plan: Schedule) -> bool:
        # The solver counts in whole numbers, and what they hide is seen here.
        try:
            validate(plan)
        except ScheduleError:
            return False
        return self._problem.keeps(plan)

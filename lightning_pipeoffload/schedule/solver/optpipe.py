"""OptPipe: a solver decides the order of F, B and W together with the copies to the host.

Source of the idea: Li et al., "OptPipe", arXiv 2510.05186. Here the solver is OR-tools' CP-SAT. It
starts from the best plan that the families of schedules have, and so never gives a slower one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import isfinite
from os import PathLike
from time import monotonic
from typing import Any

from ..actions import MemoryLimitError, ScheduleError
from ..builders.classic import late_weight_gradients
from ..candidates import options
from ..costs import Costs
from ..make_plan import PlanRequest, make_plan
from ..passes.offload import offload_activations
from ..passes.transfer import split_every_backward
from ..plan_cache import PlanCache, PlanCacheKey
from ..schedule import Schedule, loop_placement, v_placement
from ..simulation.memory import peak_memory
from ..validate import validate
from .plan_model import PlanModel, check_solver
from .plan_problem import IntegerCosts, PlanProblem

_ABOUT_EQUAL = 1 + 1e-6
_MOST_STEPS = 8  # orders between two families that are tried


def best_of_families(problem: PlanProblem) -> Schedule:
    """Return the fastest plan that ``auto`` would find within a limit, with W apart from B.

    Of equal ones it is that which needs least memory.

    Raises:
        ScheduleError: No family has a plan within the limit.
    """
    asked = options([problem.num_microbatches], num_chunks=problem.num_chunks)
    request = PlanRequest(
        problem.num_ranks,
        [o for o in asked if o.placement(problem.num_ranks) == problem.placement],
        lambda option: problem.costs,
        problem.memory_limit,
        has_barrier=lambda option: problem.has_barrier,
    )
    candidates = make_plan(request).candidates
    schedules = [c.schedule for c in candidates if c.schedule is not None]
    plans = [replace(split_every_backward(plan), name="optpipe") for plan in schedules]
    fitting = {plan: problem.seconds(plan) for plan in plans if problem.fits_memory_limit(plan)}
    if not fitting:
        assert problem.memory_limit is not None
        needed = min(max(peak_memory(plan, problem.costs)) for plan in plans)
        sentence = "{limit} is less than the {needed} that W apart from B needs; use at least that"
        raise MemoryLimitError(sentence, problem.memory_limit, needed)
    enough = min(fitting.values()) * _ABOUT_EQUAL
    fast = (plan for plan, seconds in fitting.items() if seconds <= enough)
    return min(fast, key=lambda plan: max(peak_memory(plan, problem.costs)))


def _best_between_families(problem: PlanProblem, start: Schedule) -> Schedule:
    """Return the fastest of a plan and those between families, which take longer to try."""
    if problem.num_chunks > 1 or problem.memory_limit is None:
        return start
    steps = range(0, problem.num_ranks, max(1, problem.num_ranks // _MOST_STEPS))
    plans = [start]
    for depth, sooner in product((1, 2), steps):
        sizes = problem.num_ranks, problem.num_microbatches
        plan = late_weight_gradients(*sizes, depth=depth, sooner=sooner)
        if not problem.fits_memory_limit(plan):
            try:
                plan, _ = offload_activations(plan, problem.costs, "auto", problem.memory_limit)
            except ScheduleError:
                continue
        plans.append(plan)
    return min(plans, key=problem.seconds)


class PlanImprover:
    """The best plan so far of a problem.

    Args:
        problem: The problem.
        start: A plan that keeps the limit, with B and W apart.
        on_better: Called with every plan that is better than all before.

    Attributes:
        plan: The best plan.
        seconds: Its seconds.
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
        self._enough = problem.lower_bound * _ABOUT_EQUAL
        self.is_final = self.seconds <= self._enough

    def improve(self, seconds: float) -> None:
        """Look for better plans, for some seconds at most."""
        deadline = monotonic() + seconds
        self._keep_if_better(_best_between_families(self._problem, self.plan))
        if self.is_final or monotonic() >= deadline:
            return
        costs = self._problem.costs
        whole = IntegerCosts.rounded(costs, self._problem.placement, self._problem.memory_limit)
        model = PlanModel(whole, costs, self.plan, self._problem.has_barrier)
        left = deadline - monotonic()
        if left > 0 and model.solve(left, self._keep_if_better):
            self.is_final = True

    def _keep_if_better(self, plan: Schedule) -> bool:
        """Take a plan if it is better, by its real costs; return whether to go on."""
        if self._is_valid_and_fits(plan):
            seconds = self._problem.seconds(plan)
            if seconds < self.seconds:
                self.plan, self.seconds = plan, seconds
                self.is_final = seconds <= self._enough
                self._on_better(plan)
        return not self.is_final

    def _is_valid_and_fits(self, plan: Schedule) -> bool:
        # The solver counts in whole numbers, so its plans are checked by the real costs.
        try:
            validate(plan)
        except ScheduleError:
            return False
        return self._problem.fits_memory_limit(plan)


def optpipe(
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    *,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    solver_seconds: float = 60.0,
    plan_cache: str | PathLike[str] | None = None,
) -> Schedule:
    """The shortest plan that a solver finds in some time, copies among its actions (OptPipe).

    Args:
        num_chunks: Stages per rank; two go down the ranks and back up, more go round.
        costs: Seconds and memory of the stages; None: F, B, W and an activation are 1.
        memory_limit: The most memory of a rank, in the unit of the costs; None: any.
        solver_seconds: The most that the solver takes; it ends sooner where no plan is better.
        plan_cache: Folder of the plans that were found; None: one in the user's cache folder.

    Raises:
        ScheduleError: OR-tools is not installed, or no plan keeps the limit.
    """
    placement = optpipe_placement(num_ranks, num_chunks)
    problem = PlanProblem(num_microbatches, placement, costs or Costs.unit(), memory_limit)
    return solve_plan(problem, solver_seconds, plan_cache)


def solve_plan(
    problem: PlanProblem,
    solver_seconds: float = 60.0,
    plan_cache: str | PathLike[str] | None = None,
) -> Schedule:
    """Return the shortest plan of a problem that a solver finds; arguments as above."""
    check_solver()
    check_solver_seconds(solver_seconds)
    solved_plans = SolvedPlanCache(PlanCache(plan_cache), problem)
    if solved_plans.suffices(solver_seconds):
        return solved_plans.start()
    improvement = PlanImprover(problem, solved_plans.start())
    if not improvement.is_final:
        improvement.improve(solver_seconds)
        solved_plans.keep(improvement, solver_seconds)
    return improvement.plan


def optpipe_placement(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Return the rank of every stage: two per rank go down and back up, more go round."""
    return v_placement(num_ranks) if num_chunks == 2 else loop_placement(num_ranks, num_chunks)


def check_solver_seconds(seconds: Any) -> None:
    """Check the seconds that the solver may take.

    Raises:
        ScheduleError: It is no number of seconds.
    """
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not isfinite(seconds) or seconds < 0:
        raise ScheduleError(f"solver_seconds ({seconds!r}) must be a number from 0 on, such as 60")


# A plan that was sought for about as long is not sought again.
_ABOUT_AS_LONG = 0.9


class SolvedPlanCache:
    """The plan of a problem that a cache has."""

    def __init__(self, cache: PlanCache, problem: PlanProblem) -> None:
        self._cache, self._problem = cache, problem
        counted = "step" if problem.has_barrier else "period"
        self._question = PlanCacheKey(
            f"optpipe {counted} {','.join(map(str, problem.placement))}",
            problem.num_ranks,
            problem.num_microbatches,
            problem.num_chunks,
            problem.costs,
            problem.memory_limit,
        )
        cached = cache.find(self._question)
        self._cached = (
            cached if cached is not None and problem.fits_memory_limit(cached.schedule) else None
        )

    def suffices(self, solver_seconds: float) -> bool:
        """Return whether a search of ``solver_seconds`` would hardly improve a known plan."""
        cached = self._cached
        if cached is None or not cached.is_exact:
            return False
        spent = cached.remarks.get("solver_seconds", 0.0)
        return bool(cached.remarks.get("is_final")) or spent >= solver_seconds * _ABOUT_AS_LONG

    def start(self, families: Schedule | None = None) -> Schedule:
        """Return the known plan if it suffices, else the best to start from.

        Args:
            families: A plan that there is; None: the best of the families is sought where none was
                found for the same question.

        Raises:
            ScheduleError: No plan keeps the limit.
        """
        cached = self._cached
        if cached is not None and cached.is_exact and families is None:
            return cached.schedule
        best = families or best_of_families(self._problem)
        if cached is None:
            return best
        return min((best, cached.schedule), key=self._problem.seconds)

    def keep(self, improvement: PlanImprover, solver_seconds: float) -> None:
        """Store a plan with the seconds that it was sought for."""
        remarks = {"solver_seconds": solver_seconds, "is_final": improvement.is_final}
        self._cache.store(self._question, improvement.plan, remarks)

"""OptPipe: a solver decides the order of F, B and W together with what is offloaded, and when.

Source of the idea: Li et al., "OptPipe", arXiv 2510.05186. Here the solver is OR-tools' CP-SAT. It
starts from the best plan that the families of schedules have, and so never gives a slower one.
"""

from __future__ import annotations

from math import isfinite
from os import PathLike
from typing import Any

from ..actions import ScheduleError
from ..costs import Costs
from ..placement import loop, v
from ..plan_cache import PlanCache, PlanQuestion
from ..schedule import Schedule
from .cp_sat import check_solver
from .improve import Improvement
from .plan_problem import PlanProblem
from .starts import best_of_families

__all__ = ["SolvedPlans", "check_solver_seconds", "optpipe", "optpipe_placement", "solved"]

# A plan that was sought for about as long is not sought again.
_ABOUT_AS_LONG = 0.9


def optpipe(  # noqa: PLR0913 - each is an option of build
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
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of one step.
        num_chunks: Stages per rank; two go down the ranks and back up, more go round.
        costs: Seconds and memory of the stages; None: F, B, W and an activation are 1.
        memory_limit: The most memory of a rank, in the unit of the costs; None: any.
        solver_seconds: What the solver may take; it ends sooner where nothing is left to gain.
        plan_cache: Folder of the plans that were found; None: one in the user's cache folder.

    Raises:
        ScheduleError: OR-tools is not installed, or no plan keeps the limit.
    """
    placement = optpipe_placement(num_ranks, num_chunks)
    problem = PlanProblem(num_microbatches, placement, costs or Costs.unit(), memory_limit)
    return solved(problem, solver_seconds, plan_cache)


def solved(
    problem: PlanProblem,
    solver_seconds: float = 60.0,
    plan_cache: str | PathLike[str] | None = None,
) -> Schedule:
    """Return the shortest plan of a problem that a solver finds; arguments as above."""
    check_solver()
    check_solver_seconds(solver_seconds)
    known = SolvedPlans(PlanCache(plan_cache), problem)
    if known.settles(solver_seconds):
        return known.start()
    improvement = Improvement(problem, known.start())
    if not improvement.is_final:
        improvement.go_on(solver_seconds)
        known.keep(improvement, solver_seconds)
    return improvement.plan


def optpipe_placement(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Return the rank of every stage: two per rank go down and back up, more go round."""
    return v(num_ranks) if num_chunks == 2 else loop(num_ranks, num_chunks)


def check_solver_seconds(seconds: Any) -> None:
    """Check what the solver may take.

    Raises:
        ScheduleError: It is no number of seconds.
    """
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not isfinite(seconds) or seconds < 0:
        raise ScheduleError(f"solver_seconds ({seconds!r}) must be a number from 0 on, such as 60")


class SolvedPlans:
    """What a cache has of a problem.

    Args:
        cache: The folder of plans.
        problem: What a plan is sought for.
    """

    def __init__(self, cache: PlanCache, problem: PlanProblem) -> None:
        self._cache, self._problem = cache, problem
        counted = "step" if problem.has_barrier else "period"
        self._question = PlanQuestion(
            f"optpipe {counted} {','.join(map(str, problem.placement))}",
            problem.num_ranks,
            problem.num_microbatches,
            problem.num_chunks,
            problem.costs,
            problem.memory_limit,
        )
        found = cache.find(self._question)
        self._found = found if found is not None and problem.keeps(found.schedule) else None

    def settles(self, solver_seconds: float) -> bool:
        """Whether there is a plan that so many seconds would hardly make better."""
        found = self._found
        if found is None or not found.is_exact:
            return False
        spent = found.remarks.get("solver_seconds", 0.0)
        return bool(found.remarks.get("is_final")) or spent >= solver_seconds * _ABOUT_AS_LONG

    def start(self, families: Schedule | None = None) -> Schedule:
        """Return the plan that settles it, else the best to start from.

        Args:
            families: A plan that there is; None: the best of the families is sought where none was
                found for the same question.

        Raises:
            ScheduleError: No plan keeps the limit.
        """
        found = self._found
        if found is not None and found.is_exact and families is None:
            return found.schedule
        best = families or best_of_families(self._problem)
        if found is None:
            return best
        return min((best, found.schedule), key=self._problem.seconds)

    def keep(self, improvement: Improvement, solver_seconds: float) -> None:
        """Put what was found into the cache.

        Args:
            improvement: What was found.
            solver_seconds: What it has taken.
        """
        remarks = {"solver_seconds": solver_seconds, "is_final": improvement.is_final}
        self._cache.store(self._question, improvement.plan, remarks)

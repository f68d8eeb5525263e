"""The best plan that is known under a memory limit without a solver: where one starts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from ..actions import MemoryLimitError, ScheduleError
from ..builders.zero_bubble import late_weight_gradients
from ..candidates import options
from ..make_plan import PlanRequest, make_plan
from ..passes.offload import offload_activations
from ..passes.transfer import split_every_backward
from ..schedule import Schedule
from ..simulation.memory import peak_memory
from .plan_problem import PlanProblem

__all__ = ["best_of_families", "best_start"]

_ABOUT_EQUAL = 1 + 1e-6
_MOST_STEPS = 8  # orders between two families that are tried


def best_of_families(problem: PlanProblem) -> Schedule:
    """Return the fastest plan that ``auto`` would find within a limit, with W apart from B.

    Of equal ones it is that which keeps least.

    Args:
        problem: What it is sought for.

    Raises:
        ScheduleError: No family has a plan within the limit.
    """
    asked = options([problem.num_microbatches], num_chunks=problem.num_chunks)
    wanted = [o for o in asked if o.placement(problem.num_ranks) == problem.placement]
    request = PlanRequest(
        problem.num_ranks,
        wanted,
        lambda option: problem.costs,
        problem.memory_limit,
        has_barrier=lambda option: problem.has_barrier,
    )
    candidates = make_plan(request).candidates
    found = [c.schedule for c in candidates if c.schedule is not None]
    plans = [replace(split_every_backward(plan), name="optpipe") for plan in found]
    fitting = {plan: problem.seconds(plan) for plan in plans if problem.keeps(plan)}
    if not fitting:
        assert problem.memory_limit is not None
        needed = min(max(peak_memory(plan, problem.costs)) for plan in plans)
        sentence = "{limit} is less than the {needed} that W apart from B needs; use at least that"
        raise MemoryLimitError(sentence, problem.memory_limit, needed)
    enough = min(fitting.values()) * _ABOUT_EQUAL
    fast = (plan for plan, seconds in fitting.items() if seconds <= enough)
    return min(fast, key=lambda plan: max(peak_memory(plan, problem.costs)))


def best_start(problem: PlanProblem, known: Schedule) -> Schedule:
    """Return the fastest of a plan and those between families, which take longer to try.

    Args:
        problem: What it is sought for.
        known: A plan that keeps the limit.
    """
    if problem.num_chunks > 1 or problem.memory_limit is None:
        return known
    steps = range(0, problem.num_ranks, max(1, problem.num_ranks // _MOST_STEPS))
    sizes = problem.num_ranks, problem.num_microbatches
    between = (late_weight_gradients(*sizes, *late) for late in product((1, 2), steps))
    plans = (_within(problem, order) for order in between)
    return min((known, *filter(None, plans)), key=problem.seconds)


def _within(problem: PlanProblem, order: Schedule) -> Schedule | None:
    if problem.keeps(order):
        return order
    try:
        return offload_activations(order, problem.costs, "auto", problem.memory_limit)[0]
    except ScheduleError:
        return None

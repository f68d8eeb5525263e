"""The best plan that the families of schedules have under a memory limit: where a solver starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from math import inf
from typing import Any

from ..actions import Action, Kind, MemoryLimitError, ScheduleError
from ..builders.classic import gpipe, interleaved_1f1b, one_f_one_b
from ..builders.grouped import gis, gis_h, uniform
from ..builders.v_adaptive import v
from ..builders.v_shape import one_f_one_b_v
from ..builders.zb import zb
from ..builders.zb_v import zb_v
from ..builders.zero_bubble import late_weight_gradients, zb_h1, zb_h2
from ..costs import Costs
from ..passes.offload import offload_activations
from ..schedule import Schedule
from .paging import paged
from .plan_problem import PlanProblem

__all__ = ["best_of_families", "best_start"]

_Builder = Callable[..., Schedule]

_MOST_STEPS = 8  # orders between two families that are tried


def best_of_families(problem: PlanProblem) -> Schedule:
    """Return the fastest plan of all families within a limit, with its copies and W apart from B.

    Args:
        problem: What it is sought for.

    Raises:
        ScheduleError: No family has a plan within the limit.
    """
    return _best(problem, _builders(problem))


def best_start(problem: PlanProblem, known: Schedule) -> Schedule:
    """Return the fastest of a plan and those between families, which take longer to try.

    Args:
        problem: What it is sought for.
        known: A plan that keeps the limit.
    """
    if problem.num_chunks > 1 or problem.memory_limit is None:
        return known
    steps = range(0, problem.num_ranks, max(1, problem.num_ranks // _MOST_STEPS))
    between = [partial(_late, depth=depth, sooner=sooner) for depth in (1, 2) for sooner in steps]
    try:
        other = _best(problem, between)
    except ScheduleError:
        return known
    return min((known, other), key=problem.seconds)


def _late(num_ranks: int, num_microbatches: int, _: int, depth: int, sooner: int) -> Schedule:
    return late_weight_gradients(num_ranks, num_microbatches, depth, sooner)


def _best(problem: PlanProblem, builders: Iterable[_Builder]) -> Schedule:
    ways = (_as_it_is,) if problem.memory_limit is None else (_as_it_is, _offloaded, _paged)
    sizes = problem.num_ranks, problem.num_microbatches, problem.num_chunks
    errors = [ScheduleError("no family of schedules can be")]

    def made(make: Callable[[], Schedule]) -> Iterator[Schedule]:
        try:
            plan = make()
            if plan.placement == problem.placement:
                yield plan
        except ScheduleError as error:
            errors.append(error)

    orders = [order for builder in builders for order in made(partial(_apart, builder, sizes))]
    limits = problem.costs, problem.memory_limit
    found = [plan for o, way in product(orders, ways) for plan in made(partial(way, o, *limits))]
    fitting = [plan for plan in found if problem.keeps(plan)]
    if not fitting:
        raise min(errors, key=_needed)
    return min(fitting, key=problem.seconds)


def _needed(error: ScheduleError) -> float:
    """Return the memory that an error asks for; the least of them is what tells most."""
    return float(error.args[2]) if isinstance(error, MemoryLimitError) else inf


def _builders(problem: PlanProblem) -> Iterator[_Builder]:
    limits: dict[str, Any] = {"costs": problem.costs, "memory_limit": problem.memory_limit}
    if problem.num_chunks == 1:
        yield from (zb_h2, zb_h1, one_f_one_b, gpipe)
        yield from (partial(zb, **limits), partial(zb, costs=problem.costs))
        return
    yield from (interleaved_1f1b, gis, gis_h, uniform)
    if problem.num_chunks == 2:
        yield from (one_f_one_b_v, partial(zb_v, **limits), partial(v, **limits))
        yield partial(zb_v, costs=problem.costs)


def _as_it_is(plan: Schedule, costs: Costs, memory_limit: float | None) -> Schedule:
    return plan


def _offloaded(plan: Schedule, costs: Costs, memory_limit: float | None) -> Schedule:
    return offload_activations(plan, costs, "auto", memory_limit)[0]


def _paged(plan: Schedule, costs: Costs, memory_limit: float | None) -> Schedule:
    return paged(plan, costs, inf if memory_limit is None else memory_limit)


def _apart(builder: _Builder, sizes: tuple[int, int, int]) -> Schedule:
    """Build an order, and split every BW."""

    def split(action: Action) -> tuple[Action, ...]:
        if action.kind is Kind.BW:
            return action._replace(kind=Kind.B), action._replace(kind=Kind.W)
        return (action,)

    ranks = ([part for action in rank for part in split(action)] for rank in builder(*sizes))
    return Schedule.of(ranks, "optpipe")

"""The names of schedules, and the one function that builds any of them."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from .actions import ScheduleError
from .costs import Costs
from .families import FAMILIES, Recipe, build_from_recipe
from .schedule import Schedule
from .solver.optpipe import optpipe, optpipe_placement

DEFAULT_SCHEDULE = "zb_h1"
"""In place of ``"auto"`` where nothing can be measured: 1F1B's memory, a third of its bubble."""

SCHEDULES = {
    **FAMILIES,
    "optpipe": Recipe(optpipe, 1, None, optpipe_placement),
}


def build(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    **options: Any,
) -> Schedule:
    """Build a schedule by its name, and check it.

    Args:
        name: One of ``SCHEDULES``.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of one step.
        num_chunks: Stages per rank; None: the schedule's default.
        costs: The costs of the stages; builders that do not search ignore the times.
        memory_limit: The most memory of a rank, in the unit of ``costs``; without costs the
            activation of a stage and microbatch is 1.
        **options: Other options of the builder, such as ``group_size``.

    Raises:
        ScheduleError: There is no such schedule, it does not accept a size or an option, or the
            order is not valid.
        MemoryLimitError: The schedule needs more memory than ``memory_limit``.
    """
    check_name(name)
    sizes = num_ranks, num_microbatches, num_chunks
    return build_from_recipe(SCHEDULES[name], name, sizes, costs, memory_limit, **options)


def check_name(name: str, *others: str) -> None:
    """Check that a schedule name exists; the error also lists ``others``.

    Raises:
        ScheduleError: The name does not exist.
    """
    if name not in SCHEDULES:
        names = ", ".join((*SCHEDULES, *others))
        similar = get_close_matches(name.lower(), SCHEDULES, n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise ScheduleError(f"schedule {name!r} does not exist; use one of {names}{hint}")

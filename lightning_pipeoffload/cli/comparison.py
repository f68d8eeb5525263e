"""Several schedules side by side, for the same work of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.table import Column, Table

from lightning_pipeoffload.cli.border_options import BorderOptions
from lightning_pipeoffload.cli.planned_steps import PlannedSteps
from lightning_pipeoffload.cli.units import UNITS, Units
from lightning_pipeoffload.pictures.picture_file import Drawn
from lightning_pipeoffload.schedule import (
    SCHEDULES,
    Costs,
    Schedule,
    ScheduleError,
    add_reductions,
    build,
    offload_activations,
)
from lightning_pipeoffload.schedule.quantities import share_text

__all__ = [
    "NARROW",
    "Compared",
    "bare_table",
    "compare",
    "comparison_table",
    "costs_of_stage",
    "parse_name",
    "stages_per_rank",
    "with_reductions",
]

Row = dict[str, Any]


class Compared(NamedTuple):
    """One of several schedules side by side.

    Attributes:
        figures: The figures of the schedule; or under ``refused`` why it cannot be.
        drawn: Its timeline; None where it cannot be.
    """

    figures: Row
    drawn: Drawn | None = None


NARROW = (0, 0)
"""The padding of a table with so many columns that it would not fit 80 characters."""

_NO_BARRIER = BorderOptions()
_OF_THE_MACHINE = ("communication", "copy_lanes", "ranks_per_link")

HEADINGS = (
    *("stages", "step", "bubble", "alone", "its bubble"),
    *("memory", "host", "messages"),
)


def compare(
    names: Iterable[str],
    costs: Costs,
    memory_limit: float | None = None,
    num_chunks: int | None = None,
    border: BorderOptions = _NO_BARRIER,
    units: Units = UNITS,
    **sizes: int,
) -> list[Compared]:
    """Time each schedule, or say why it cannot be.

    Args:
        names: Schedules by name, ``uniform+half`` or ``uniform+0.3`` with offload; the
            result has their order.
        costs: The costs of a rank's whole part of the model; see :func:`costs_of_stage`.
        memory_limit: The most memory of a rank, in the unit of ``costs.activation``.
        num_chunks: Stages per rank of the schedules that take any number; None: their own.
        border: What stands between two steps.
        units: What the costs are counted in.
        **sizes: ``num_ranks`` and ``num_microbatches``.

    Raises:
        ScheduleError: None of the schedules can be.
    """
    plans = []
    for name in names:
        try:
            planned = _planned(name, costs, memory_limit, num_chunks, border, sizes)
        except ScheduleError as error:
            refused = {"schedule": name, "refused": str(error).partition("\n")[0]}
            plans.append(Compared(refused))
        else:
            plans.append(Compared(planned.figures(), planned.drawn(units)))
    if not any(plan.drawn for plan in plans):
        nothing = "compare is empty; name schedules"
        raise ScheduleError(plans[0].figures["refused"] if plans else nothing)
    return plans


def _planned(
    name: str,
    costs: Costs,
    memory_limit: float | None,
    num_chunks: int | None,
    border: BorderOptions,
    sizes: Mapping[str, int],
) -> PlannedSteps:
    base, amount = parse_name(name)
    chunks = stages_per_rank(base, num_chunks)
    costs = costs_of_stage(costs, chunks)
    limit = memory_limit if amount is None else None
    schedule = build(base, num_chunks=chunks, costs=costs, memory_limit=limit, **sizes)
    if amount is not None:
        schedule, _ = offload_activations(schedule, costs, amount, memory_limit)
    return PlannedSteps(replace(with_reductions(schedule, costs), name=name), costs, border)


def parse_name(name: str) -> tuple[str, str | float | None]:
    """Take ``uniform+half`` or ``uniform+0.3`` apart: the schedule, and what of it is offloaded.

    The amount is a share of the activations, or its name; None: there is none.
    """
    base, _, amount = name.partition("+")
    try:
        return base, float(amount)
    except ValueError:
        return base, amount or None


def stages_per_rank(name: str, wanted: int | None) -> int:
    """Return how many stages a rank has in a schedule, ``wanted`` if it takes any number."""
    recipe = SCHEDULES.get(name)
    if recipe is None:
        return 1
    return recipe.num_chunks if recipe.max_chunks else wanted or recipe.num_chunks


def with_reductions(schedule: Schedule, costs: Costs) -> Schedule:
    """Return a schedule with REDUCE where it takes time: the costs are those of a replica."""
    takes_time = any(costs.per_stage("reduce", schedule.num_stages))
    return add_reductions(schedule) if takes_time and not schedule.has_reductions else schedule


def costs_of_stage(costs: Costs, num_chunks: int) -> Costs:
    """Return what one of several stages of a rank costs.

    So schedules with few and with many stages on a rank have the same work, and memory has one
    unit for all of them, and for the limit: the ``activation`` of a rank.

    Args:
        costs: The costs of a rank's whole part of the model; a sequence has one number for each
            stage, and stays as it is.
        num_chunks: Stages of a rank.
    """
    values = {field.name: getattr(costs, field.name) for field in fields(costs)}
    divided: dict[str, Any] = {
        name: value / num_chunks
        for name, value in values.items()
        if name not in _OF_THE_MACHINE and isinstance(value, (int, float))
    }
    return replace(costs, **divided)


def comparison_table(rows: Iterable[Row], title: str, units: Units = UNITS) -> Table:
    """Return a table with one row per schedule; one that cannot be has a dash for each figure.

    A step is from one to the next, as ``optimizer_sync`` has it; "alone" is one step from its start
    to its end. Memory and host are the largest peaks of a rank, messages those of all ranks.
    """
    title = f"{title}{units.words}"
    columns = (Column("schedule", no_wrap=True), *HEADINGS)
    table = bare_table(*columns, title=title, padding=NARROW)
    for row in rows:
        table.add_row(
            row["schedule"],
            *(_cells(row, units) if "refused" not in row else ["-"] * len(HEADINGS)),
        )
    return table


def bare_table(*columns: Column | str, title: str, padding: tuple[int, int] = (0, 1)) -> Table:
    """Return an empty table with a line below its headings and none around it.

    Args:
        *columns: What stands above each.
        title: The line above all.
        padding: Spaces above and below a cell, and beside it.
    """
    return Table(*columns, title=title, box=SIMPLE, pad_edge=False, padding=padding)


def _cells(row: Row, units: Units) -> list[str]:
    return [
        str(row["num_chunks"]),
        units.write_time(row["period"]),
        share_text(row["period_bubble"]),
        units.write_time(row["makespan"]),
        share_text(row["bubble"]),
        units.write_memory(max(row["peak_memory"])),
        units.write_memory(max(row["peak_host_memory"])),
        str(sum(row["messages"])),
    ]

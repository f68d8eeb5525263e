"""Several schedules side by side, for the same work of every rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from rich.box import SIMPLE
from rich.table import Column, Table

from lightning_pipeoffload.figures import figures
from lightning_pipeoffload.schedule import (
    SCHEDULES,
    Costs,
    ScheduleError,
    build,
    offload_activations,
    simulate,
)

__all__ = ["compare", "comparison_table"]

Row = dict[str, Any]

_OF_THE_MACHINE = ("communication", "copy_lanes", "ranks_per_link")

HEADINGS = ("stages", "makespan", "bubble", "no barrier", "memory", "host", "messages")


def compare(
    names: Iterable[str],
    costs: Costs,
    memory_limit: float | None = None,
    num_chunks: int | None = None,
    **sizes: int,
) -> list[Row]:
    """Return the figures of each schedule, or under ``refused`` why it cannot be.

    Args:
        names: Schedules by name, ``uniform+half`` or ``uniform+0.3`` with offload; the
            result has their order.
        costs: Of a rank that holds one stage. A schedule with v stages per rank has 1/v of each
            number in a stage, but for the communication; sequences stay as they are.
        memory_limit: The most memory of a rank.
        num_chunks: Stages per rank of the schedules that take any number; None: their own.
        **sizes: ``num_ranks`` and ``num_microbatches``.

    Raises:
        ScheduleError: None of them can be.
    """
    rows = [_row(name, costs, memory_limit, num_chunks, sizes) for name in names]
    if all("refused" in row for row in rows):
        raise ScheduleError(rows[0]["refused"] if rows else "compare is empty; name schedules")
    return rows


def _row(
    name: str,
    costs: Costs,
    memory_limit: float | None,
    num_chunks: int | None,
    sizes: Mapping[str, int],
) -> Row:
    base, _, amount = name.partition("+")
    chunks = _chunks(base, num_chunks)
    costs = _of_one_stage(costs, chunks)
    limit = None if amount else memory_limit
    try:
        schedule = build(base, num_chunks=chunks, costs=costs, memory_limit=limit, **sizes)
        if amount:
            schedule, _ = offload_activations(schedule, costs, _number(amount), memory_limit)
        return {**figures(schedule, simulate(schedule, costs)), "schedule": name}
    except ScheduleError as error:
        return {"schedule": name, "refused": str(error).partition("\n")[0]}


def _number(amount: str) -> str | float:
    """Return a share of the activations as a number, what has a name as it is."""
    try:
        return float(amount)
    except ValueError:
        return amount


def _chunks(name: str, wanted: int | None) -> int:
    recipe = SCHEDULES.get(name)
    if recipe is None:
        return 1
    return recipe.num_chunks if recipe.max_chunks else wanted or recipe.num_chunks


def _of_one_stage(costs: Costs, num_chunks: int) -> Costs:
    values = {field.name: getattr(costs, field.name) for field in fields(costs)}
    divided: dict[str, Any] = {
        name: value / num_chunks
        for name, value in values.items()
        if name not in _OF_THE_MACHINE and isinstance(value, (int, float))
    }
    return replace(costs, **divided)


def comparison_table(rows: Iterable[Row], title: str) -> Table:
    """Return a table with one row per schedule; one that cannot be has a dash for each figure.

    The bubble is with a barrier at the optimizer and without one, memory and host the largest
    peaks of a rank, and messages are those of all ranks in a step.
    """
    table = Table(
        Column("schedule", no_wrap=True), *HEADINGS, title=title, box=SIMPLE, pad_edge=False
    )
    for row in rows:
        table.add_row(
            row["schedule"], *(_cells(row) if "refused" not in row else ["-"] * len(HEADINGS))
        )
    return table


def _cells(row: Row) -> list[str]:
    return [
        str(row["num_chunks"]),
        f"{row['makespan']:g}",
        f"{row['bubble']:.4f}",
        f"{row['bubble_unsynchronized']:.4f}",
        f"{max(row['peak_memory']):g}",
        f"{max(row['peak_host_memory']):g}",
        str(sum(row["messages"])),
    ]

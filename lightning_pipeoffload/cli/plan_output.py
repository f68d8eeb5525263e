"""What ``pipeoffload-plan`` prints: tables and a drawing, or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from lightning_pipeoffload.pictures.picture_file import Drawn
from lightning_pipeoffload.planning.figures import choice_table, lines_of_refused
from lightning_pipeoffload.schedule import (
    Costs,
    OffloadReport,
    Schedule,
    Timeline,
    copy_ratios,
    draw,
    free_share,
    period_bubble,
    simulate,
    simulate_steps,
    steady_period,
)
from lightning_pipeoffload.schedule.make_plan import Plan
from lightning_pipeoffload.schedule.messages import send_after
from lightning_pipeoffload.schedule.quantities import bytes_text, seconds_text, share_text

__all__ = [
    "MEASURED",
    "PlannedSteps",
    "Steps",
    "Units",
    "bare_table",
    "comparison_table",
    "describe",
    "print_choice",
    "print_comparison",
    "print_plan",
]

_TIMES = ("forward", "backward_input", "backward_weight")
_COUNTS = ("wanted", "offloaded", "queued", "kept")  # of each rank, as OffloadReport names them
_HEADINGS = ("stages", "step", "bubble", "alone", "its bubble", "memory", "host", "messages")


class Units(NamedTuple):
    """What one second and one byte stand for.

    Attributes:
        time: "s", or "units" where F, B and W all take 1.
        memory: "activations of a rank", what a microbatch keeps on a rank's stages together,
            "unit of costs.activation" where that is given, or "bytes".
    """

    time: str = "units"
    memory: str = "activations of a rank"

    @classmethod
    def of(cls, costs: Costs) -> Units:
        """Return the units of costs as the user gave them, of a rank's part of the model."""
        is_unit = all(getattr(costs, name) == 1 for name in _TIMES)
        time = "units" if is_unit else "s"
        return cls(time, cls().memory if costs.activation == 1 else "unit of costs.activation")

    @property
    def is_measured(self) -> bool:
        """Whether times are in seconds and memory is in bytes, so that cells have their units."""
        return self == MEASURED

    def write_time(self, value: float) -> str:
        """Write a time; where it is not measured its unit stands elsewhere."""
        return seconds_text(value) if self.is_measured else f"{value:.6g}"

    def write_memory(self, value: float) -> str:
        """Write an amount of memory; where it is not in bytes its unit stands elsewhere."""
        return bytes_text(value) if self.is_measured else f"{value:.6g}"

    def sentence(self, value: float) -> str:
        """Write a time with its unit."""
        return self.write_time(value) + ("" if self.is_measured else f" {self.time}")

    @property
    def words(self) -> str:
        """What a table is in, for its title."""
        return "" if self.is_measured else f"; time in {self.time}, memory in {self.memory}"


UNITS = Units()
"""Of costs that are not given."""

MEASURED = Units("s", "bytes")
"""Of a device's data sheet, and of what was measured."""


class Steps(NamedTuple):
    """How steps follow each other.

    Attributes:
        has_barrier: Whether no rank begins a step before all have ended the one before.
        num_drawn: Steps that a picture shows.
    """

    has_barrier: bool = False
    num_drawn: int = 1

    @property
    def words(self) -> str:
        """What a period is one of."""
        return f"with{'' if self.has_barrier else 'out'} a barrier between steps"


@dataclass(frozen=True)
class PlannedSteps:
    """A schedule as it is timed: one step, and steps one after the other.

    Attributes:
        schedule: The schedule of a step.
        costs: The costs of its stages.
        steps: How steps follow each other.
    """

    schedule: Schedule
    costs: Costs
    steps: Steps

    @cached_property
    def timeline(self) -> Timeline:
        """One step alone."""
        return simulate(self.schedule, self.costs)

    @cached_property
    def period(self) -> float:
        """The time from one step to the next."""
        return steady_period(self.schedule, self.costs, self.steps.has_barrier)

    @property
    def period_bubble(self) -> float:
        """The idle share of the period."""
        return period_bubble(self.timeline, self.period)

    @property
    def sizes(self) -> str:
        """The name and the sizes of the schedule, in words."""
        schedule = self.schedule
        stages = "1 stage" if schedule.num_chunks == 1 else f"{schedule.num_chunks} stages"
        return (
            f"{schedule.name}: {schedule.num_ranks} ranks of {stages}, "
            f"{schedule.num_microbatches} microbatches"
        )

    def figures(self) -> dict[str, Any]:
        """Return the figures of the plan by their names in ``Schedule`` and ``Timeline``.

        ``period`` is from one step to the next, ``messages`` how many activations and gradients
        each rank sends in a step.
        """
        sizes = ("num_ranks", "num_chunks", "num_microbatches")
        totals = ("makespan", "bubble", "bubble_unsynchronized", "peak_memory", "peak_host_memory")
        return {
            "schedule": self.schedule.name,
            **{name: getattr(self.schedule, name) for name in sizes},
            **{name: getattr(self.timeline, name) for name in totals},
            "has_barrier": self.steps.has_barrier,
            "period": self.period,
            "period_bubble": self.period_bubble,
            "messages": self.messages,
        }

    @property
    def messages(self) -> tuple[int, ...]:
        """How many messages each rank sends in a step."""
        return tuple(
            sum(send_after(self.schedule, action) is not None for action in rank)
            for rank in self.schedule
        )

    def copies(self) -> dict[str, Any]:
        """Return what JSON says of how long copies take beside the compute."""
        ratio = max(copy_ratios(self.costs, self.schedule.num_stages))
        share = free_share(self.costs, self.schedule.num_stages)
        return {
            "copy_ratio": ratio if isfinite(ratio) else None,
            "free_share": share,
            "full_offload_is_free": share == 1,
        }

    def drawn(self, units: Units) -> Drawn:
        """Return what a picture shows, with a line above it."""
        title = (
            f"{self.sizes}; a step every {units.sentence(self.period)} {self.steps.words}, bubble "
            f"{share_text(self.period_bubble)}"
        )
        how = self.steps.num_drawn, self.steps.has_barrier
        return Drawn(simulate_steps(self.schedule, self.costs, *how), self.costs, title)


def describe(plan: Plan) -> dict[str, Any]:
    """Return what JSON says of the candidates of a plan, and of what it offloads."""
    return {"candidates": [c.figures() for c in plan.candidates], **describe_offload(plan.report)}


def describe_offload(report: OffloadReport | None) -> dict[str, Any]:
    """Return what JSON says of what a plan offloads; nothing where that was not planned."""
    names = (*_COUNTS, "slowdown", "reason")
    return {name: getattr(report, name) for name in names} if report else {}


def print_choice(plan: Plan, units: Units) -> None:
    """Print what was tried, and why the rest was not."""
    console = Console()
    console.print(choice_table(plan, units.write_time, units.write_memory))
    for line in lines_of_refused(plan.candidates):
        console.print(line, highlight=False)
    console.print()


def print_plan(
    planned: PlannedSteps, told: Mapping[str, Any], units: Units, is_json: bool = False
) -> None:
    """Print a plan: a table of the ranks, the figures of all and a drawing; or one JSON object.

    Args:
        planned: The plan.
        told: What JSON says besides, as :func:`describe` returns it.
        units: What times and memory are counted in.
        is_json: Whether to print JSON, and nothing else.
    """
    told = {**planned.copies(), **told}
    if is_json:
        sys.stdout.write(json.dumps({**planned.figures(), **told}) + "\n")
        return
    console, timeline = Console(), planned.timeline
    console.print(_rank_table(planned, units))
    console.out(
        f"a step every {units.sentence(planned.period)} {planned.steps.words}, bubble "
        f"{share_text(planned.period_bubble)}; alone {units.sentence(timeline.makespan)}, bubble "
        f"{share_text(timeline.bubble)}\n",
        highlight=False,
    )
    if told["copy_ratio"] != 0 or "offloaded" in told:
        console.out(_about_copies(told), highlight=False)
    console.out(draw(timeline, console.width), highlight=False)


def _about_copies(told: Mapping[str, Any]) -> str:
    ratio = told["copy_ratio"]
    lines = [f"k {'infinite' if ratio is None else f'{ratio:.3g}'}: {_what_k_allows(told)}"]
    if "offloaded" in told:
        ranks = zip(*(told[name] for name in _COUNTS), strict=True)
        lines += [_of_rank(rank, *counts) for rank, counts in enumerate(ranks)]
        lines += filter(None, [_what_copies_cost(told["slowdown"]), told["reason"]])
    return "\n".join(lines) + "\n"


def _what_copies_cost(slowdown: float) -> str:
    times = "" if f"{slowdown:.4g}" == "1" else f"{slowdown:.4g} times "
    return f"the step takes {times}as long as without copies"


def _what_k_allows(told: Mapping[str, Any]) -> str:
    if told["copy_ratio"] == 0:
        return "copies that take no time; costs.offload and costs.reload say how long they take"
    if told["full_offload_is_free"]:
        return "full offload is free"
    return f"copies of at most {share_text(told['free_share'])} of the activations are hidden"


def _of_rank(rank: int, wanted: int, offloaded: int, queued: int, kept: int) -> str:
    queue = f", {queued} from B to W" if queued else ""
    stay = f", {kept} stay" if kept else ""
    return f"rank {rank}: of {wanted} activations {offloaded} leave from F to B{queue}{stay}"


def _rank_table(planned: PlannedSteps, units: Units) -> Table:
    """Return a table with one row per rank: time at work and idle, and the peak memory."""
    schedule, timeline = planned.schedule, planned.timeline
    headings = "rank", "stages", "busy", "idle", "peak memory"
    table = bare_table(*headings, title=planned.sizes + units.words)
    for rank, (busy, peak) in enumerate(zip(timeline.busy, timeline.peak_memory, strict=True)):
        stages = ", ".join(map(str, schedule.stages_of(rank)))
        times = map(units.write_time, (busy, timeline.makespan - busy))
        table.add_row(str(rank), stages, *times, units.write_memory(peak))
    return table


def bare_table(*columns: Column | str, title: str, is_narrow: bool = False) -> Table:
    """Return an empty table with a line below its headings and none around it.

    Args:
        *columns: What stands above each.
        title: The line above all.
        is_narrow: Whether columns stand close, for there are so many.
    """
    padding = (0, 0) if is_narrow else (0, 1)
    return Table(*columns, title=title, box=SIMPLE, pad_edge=False, padding=padding)


def print_comparison(
    rows: Sequence[Mapping[str, Any]],
    title: str,
    units: Units,
    json_sizes: Mapping[str, int] | None,
) -> None:
    """Print schedules side by side, and why others cannot be.

    Args:
        rows: The figures of each schedule; or under ``refused`` why it cannot be.
        title: The line above.
        units: What times and memory are counted in.
        json_sizes: The sizes that JSON has beside the rows; None: print a table.
    """
    if json_sizes is not None:
        sys.stdout.write(json.dumps({**json_sizes, "compare": rows}) + "\n")
        return
    console = Console()
    console.print(comparison_table(rows, title, units))
    for row in rows:
        if "refused" in row:
            console.out(f"{row['schedule']}: {row['refused']}", highlight=False)


def comparison_table(rows: Iterable[Mapping[str, Any]], title: str, units: Units = UNITS) -> Table:
    """Return a table with one row per schedule; one that cannot be has a dash for each figure.

    A step is from one to the next, as ``optimizer_sync`` has it; "alone" is one step from its start
    to its end. Memory and host are the largest peaks of a rank, messages those of all ranks.
    """
    columns = (Column("schedule", no_wrap=True), *_HEADINGS)
    table = bare_table(*columns, title=title + units.words, is_narrow=True)
    for row in rows:
        cells = ["-"] * len(_HEADINGS) if "refused" in row else _cells(row, units)
        table.add_row(row["schedule"], *cells)
    return table


def _cells(row: Mapping[str, Any], units: Units) -> list[str]:
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

"""The figures of a plan, the units they are written in, and tables of them.

Commands and runs take step time, period and bubble from here. Neither torch nor lightning is
imported, so that ``pipeoffload-plan`` answers in a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table

from lightning_pipeoffload.schedule import (
    Candidate,
    Costs,
    Plan,
    PlanOption,
    Schedule,
    Timeline,
    bytes_text,
    period_bubble,
    seconds_text,
    share_text,
    simulate,
    steady_period,
)

Write = Callable[[float], str]


class Units(NamedTuple):
    """The units of costs.

    Attributes:
        time: "s", or "units" where F, B and W all take 1.
        memory: "activations of a rank" (those of one microbatch on a rank's stages together),
            "unit of costs.activation" where that is given, or "bytes".
    """

    time: str = "units"
    memory: str = "activations of a rank"

    @classmethod
    def of(cls, costs: Costs) -> Units:
        """Return the units of costs as the user gave them, of a rank's part of the model."""
        times = costs.forward, costs.backward_input, costs.backward_weight
        time = "units" if all(value == 1 for value in times) else "s"
        return cls(time, cls().memory if costs.activation == 1 else "unit of costs.activation")

    @property
    def is_measured(self) -> bool:
        """Whether times are in seconds and memory in bytes; then each figure has its unit."""
        return self == MEASURED

    def format_time(self, value: float) -> str:
        return seconds_text(value) if self.is_measured else f"{value:.6g}"

    def format_memory(self, value: float, column_max: float = 0.0) -> str:
        """Write memory; ``column_max`` is the largest of the same column."""
        return bytes_text(value, column_max) if self.is_measured else f"{value:.6g}"

    def format_time_with_unit(self, value: float) -> str:
        """Write a time with its unit."""
        return self.format_time(value) + ("" if self.is_measured else f" {self.time}")

    @property
    def title_suffix(self) -> str:
        """The end of a table's title, where cells have no units."""
        return "" if self.is_measured else f"; time in {self.time}, memory in {self.memory}"


MEASURED = Units("s", "bytes")
"""Of measured costs, and of a device's data sheet."""


@dataclass(frozen=True)
class PlannedStep:
    """The figures of a schedule with its costs.

    Attributes:
        schedule: The schedule of a step, lowered or not.
        costs: The costs of its stages.
        has_barrier: Whether no rank begins a step before all have ended the one before.
    """

    schedule: Schedule
    costs: Costs
    has_barrier: bool = False

    @cached_property
    def timeline(self) -> Timeline:
        """One step alone; its makespan is the time of that."""
        return simulate(self.schedule, self.costs)

    @cached_property
    def period(self) -> float:
        """The time from one step to the next."""
        return steady_period(self.schedule, self.costs, self.has_barrier)

    @property
    def bubble(self) -> float:
        """The idle share of the ranks' time in a period."""
        return period_bubble(self.timeline, self.period)


class _HeadedTable(Table):
    """A table below a line of text; as a title rich would wrap it to the width of the table."""

    headline = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.headline
        yield from super().__rich_console__(console, options)


def bare_table(*columns: Column | str, title: str, is_narrow: bool = False) -> Table:
    """Return an empty table with a line below its headings and none around it."""
    padding = (0, 0) if is_narrow else (0, 1)
    table = _HeadedTable(*columns, box=SIMPLE, pad_edge=False, padding=padding)
    table.headline = title
    return table


def choice_table(plan: Plan, seconds: Write, memory: Callable[[float, float], str]) -> Table:
    """Return a table of the candidates that fit, the fastest first.

    Plans that differ in how many W's are postponed are one row, with the figures of the fastest.
    """
    fitting: dict[tuple[PlanOption, str], Candidate] = {}
    for candidate in sorted(plan.candidates, key=lambda c: (c is not plan.best, c.score)):
        if candidate.fits:
            fitting.setdefault((candidate.option, candidate.offload), candidate)
    num_tried = len({(c.option, c.offload) for c in plan.candidates})
    has_counts = len({c.option.num_microbatches for c in plan.candidates}) > 1
    recomputes = len({c.option.recompute for c in plan.candidates}) > 1
    heads = len({c.option.head_weight_grad for c in plan.candidates}) > 1
    varied = ["microbatches"] * has_counts + ["recompute"] * recomputes + ["head"] * heads
    columns = ("stages", *varied, "offload", "step", "bubble", "memory", "")
    title = f"Plans that fit: {len(fitting)} of {num_tried}"
    head = Column("schedule", no_wrap=True)
    table = bare_table(head, *columns, title=title, is_narrow=True)
    most = max((each.peak_memory or 0.0 for each in fitting.values()), default=0.0)
    rows: dict[tuple[str, ...], list[str]] = {}  # names of schedules with the same figures
    for candidate in fitting.values():
        assert candidate.period is not None
        assert candidate.peak_memory is not None
        option = candidate.option
        cells = [str(option.num_chunks)]
        cells += [str(option.num_microbatches)] * has_counts + [option.recompute] * recomputes
        cells += [option.head_weight_grad] * heads
        cells += [candidate.offload, seconds(candidate.period)]
        cells += [share_text(candidate.bubble or 0.0), memory(candidate.peak_memory, most)]
        rows.setdefault((*cells, candidate.reason or "taken"), []).append(option.schedule)
    for figures, names in rows.items():
        table.add_row(", ".join(dict.fromkeys(names)), *figures)
    return table


def lines_of_refused(candidates: Sequence[Candidate]) -> list[str]:
    """Say why schedules are left out, one reason for each, those with the same one together."""
    fitting = {candidate.option.schedule for candidate in candidates if candidate.fits}
    reasons: dict[str, str] = {}
    for candidate in candidates:
        if candidate.option.schedule not in fitting:
            reasons.setdefault(candidate.option.schedule, candidate.reason)
    return [f"{line}." for line in lines_by_reason(reasons.items())]


def lines_by_reason(refused: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each reason, with the names that it is given for."""
    by_reason: dict[str, dict[str, None]] = {}
    for name, reason in refused:
        by_reason.setdefault(reason, {})[name] = None
    return [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]

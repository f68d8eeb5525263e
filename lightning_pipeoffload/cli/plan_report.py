"""What ``pipeoffload-plan`` prints of a schedule: tables and a drawing, or JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_pipeoffload.cli.planned_steps import PlannedSteps
from lightning_pipeoffload.cli.units import UNITS, Units
from lightning_pipeoffload.schedule import OffloadReport, draw
from lightning_pipeoffload.schedule.quantities import share_text

__all__ = ["REPORTS", "figures_of", "print_json", "print_text"]


def print_json(planned: PlannedSteps, offload: dict[str, Any], units: Units = UNITS) -> None:
    """Print one JSON object with the figures, and nothing else."""
    sys.stdout.write(json.dumps({**planned.figures(), **offload}) + "\n")


def print_text(planned: PlannedSteps, offload: dict[str, Any], units: Units = UNITS) -> None:
    """Print a table of the ranks, the figures of all together and a drawing."""
    console, timeline = Console(), planned.timeline
    console.print(rank_table(planned, units))
    console.out(
        f"a step every {units.sentence(planned.period)} {planned.border.words}, bubble "
        f"{share_text(planned.period_bubble)}; alone {units.sentence(timeline.makespan)}, bubble "
        f"{share_text(timeline.bubble)}\n",
        highlight=False,
    )
    if offload["copy_ratio"] != 0 or "offloaded" in offload:
        console.out(_about_copies(offload), highlight=False)
    console.out(draw(timeline, console.width), highlight=False)


def _about_copies(offload: dict[str, Any]) -> str:
    ratio = offload["copy_ratio"]
    lines = [f"k {'infinite' if ratio is None else f'{ratio:.3g}'}: {_what_k_allows(offload)}"]
    if "offloaded" in offload:
        ranks = zip(*(offload[name] for name in COUNTS), strict=True)
        lines += [_of_rank(rank, *counts) for rank, counts in enumerate(ranks)]
        lines += filter(None, [_what_copies_cost(offload["slowdown"]), offload["reason"]])
    return "\n".join(lines) + "\n"


def _what_copies_cost(slowdown: float) -> str:
    times = "" if f"{slowdown:.4g}" == "1" else f"{slowdown:.4g} times "
    return f"the step takes {times}as long as without copies"


def _what_k_allows(offload: dict[str, Any]) -> str:
    if offload["copy_ratio"] == 0:
        return "copies that take no time; costs.offload and costs.reload say how long they take"
    if offload["full_offload_is_free"]:
        return "full offload is free"
    return f"copies of at most {offload['free_share']:.0%} of the activations are hidden"


COUNTS = ("wanted", "offloaded", "queued", "kept")
"""What is told of each rank, by its name in ``OffloadReport``."""


def figures_of(report: OffloadReport) -> dict[str, Any]:
    """Return what JSON says of what a plan offloads."""
    return {name: getattr(report, name) for name in (*COUNTS, "slowdown", "reason")}


def _of_rank(rank: int, wanted: int, offloaded: int, queued: int, kept: int) -> str:
    queue = f", {queued} from B to W" if queued else ""
    stay = f", {kept} stay" if kept else ""
    return f"rank {rank}: of {wanted} activations {offloaded} leave from F to B{queue}{stay}"


REPORTS = {"text": print_text, "json": print_json}
"""How to print, by the name of the format."""


def rank_table(planned: PlannedSteps, units: Units = UNITS) -> Table:
    """Return a table with one row per rank: time at work and idle, and the peak memory."""
    headings = (
        units.name(heading) for heading in ("rank", "stages", "busy", "idle", "peak memory")
    )
    schedule, timeline = planned.schedule, planned.timeline
    table = Table(*headings, title=planned.sizes)
    for rank, (busy, peak) in enumerate(zip(timeline.busy, timeline.peak_memory, strict=True)):
        stages = ", ".join(map(str, schedule.stages_of(rank)))
        times = map(units.write_time, (busy, timeline.makespan - busy))
        table.add_row(str(rank), stages, *times, units.write_memory(peak))
    return table

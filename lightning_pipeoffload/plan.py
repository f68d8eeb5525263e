"""``pipeoffload-plan``: what a schedule would take, before anything runs.

It is a Hydra application on conf/plan.yaml. It needs no device, and of the model only its costs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lightning_pipeoffload.configuration import run_hydra_app
from lightning_pipeoffload.schedule import (
    Costs,
    Schedule,
    ScheduleError,
    Timeline,
    build,
    draw,
    simulate,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["main", "plan"]


def plan(config: DictConfig) -> None:
    """Build and time the schedule that ``config`` names, and print the figures.

    Args:
        config: conf/plan.yaml with the command line's overrides.

    Raises:
        ScheduleError: The schedule cannot be, or there is no such format.
    """
    if config.format not in REPORTS:
        raise ScheduleError(f"format ({config.format}) must be one of {', '.join(REPORTS)}")
    costs = Costs(**_mapping(config, "costs"))
    schedule = build(
        config.strategy.schedule,
        num_ranks=config.num_ranks,
        num_microbatches=config.num_microbatches,
        num_chunks=config.num_chunks,
        costs=costs,
        memory_limit=config.memory_limit,
        **_mapping(config, "options"),
    )
    REPORTS[config.format](schedule, simulate(schedule, costs))


def _mapping(config: DictConfig, name: str) -> Mapping[str, Any]:
    value = config[name]
    if not isinstance(value, Mapping):
        raise ScheduleError(f"{name} ({value}) must have names and values; use {name}.NAME=VALUE")
    return value


def print_json(schedule: Schedule, timeline: Timeline) -> None:
    """Print one JSON object with the figures, and nothing else."""
    sys.stdout.write(json.dumps(figures(schedule, timeline)) + "\n")


def print_text(schedule: Schedule, timeline: Timeline) -> None:
    """Print a table of the ranks, the figures of all together and a drawing."""
    console = Console()
    console.print(rank_table(schedule, timeline))
    console.out(
        f"makespan {timeline.makespan:g}   bubble {timeline.bubble:.4f}   "
        f"without a barrier at the optimizer {timeline.bubble_unsynchronized:.4f}\n",
        highlight=False,
    )
    console.out(draw(timeline, console.width), highlight=False)


REPORTS = {"text": print_text, "json": print_json}


def figures(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """Return the figures of a plan by their names in ``Schedule`` and ``Timeline``."""
    sizes = ("num_ranks", "num_chunks", "num_microbatches")
    totals = ("makespan", "bubble", "bubble_unsynchronized", "peak_memory")
    return {
        "schedule": schedule.name,
        **{name: getattr(schedule, name) for name in sizes},
        **{name: getattr(timeline, name) for name in totals},
    }


def rank_table(schedule: Schedule, timeline: Timeline) -> Table:
    """Return a table with one row per rank: seconds at work and idle, and the peak memory."""
    title = (
        f"{schedule.name}: {schedule.num_ranks} ranks of {schedule.num_chunks} stages, "
        f"{schedule.num_microbatches} microbatches"
    )
    table = Table("rank", "stages", "busy", "idle", "peak memory", title=title)
    for rank, (busy, peak) in enumerate(zip(timeline.busy, timeline.peak_memory, strict=True)):
        stages = ", ".join(map(str, schedule.stages_of(rank)))
        idle = timeline.makespan - busy
        table.add_row(str(rank), stages, f"{busy:g}", f"{idle:g}", f"{peak:g}")
    return table


def main() -> None:
    """Run the console script ``pipeoffload-plan``."""
    run_hydra_app("plan", plan)


if __name__ == "__main__":
    main()

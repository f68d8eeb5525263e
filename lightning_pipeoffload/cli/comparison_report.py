"""``pipeoffload-plan compare=[...]``: the plans that are asked for, as a table, JSON or picture."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from lightning_pipeoffload.cli.border_options import BorderOptions
from lightning_pipeoffload.cli.comparison import compare, comparison_table
from lightning_pipeoffload.cli.units import MEASURED, Units
from lightning_pipeoffload.pictures.picture_file import PictureFile
from lightning_pipeoffload.schedule import Costs, ScheduleError

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["report_comparison"]


def report_comparison(config: DictConfig, costs: Costs, file: PictureFile | None) -> None:
    """Make the plans, and print or draw them.

    Args:
        config: Conf/plan.yaml with the command line's overrides.
        costs: What a rank's part of the model costs.
        file: Where to draw them; None: nowhere.

    Raises:
        ScheduleError: An argument is for one schedule.
    """
    _refuse_what_is_for_one(config)
    named = config.compare
    is_list = isinstance(named, Sequence) and not isinstance(named, str)
    names = map(str, named if is_list else [named])
    sizes = {size: config[size] for size in ("num_ranks", "num_microbatches")}
    border = BorderOptions.of(config)
    units = MEASURED if config.costs_file else Units.of(costs)
    limits = config.memory_limit, config.num_chunks
    plans = compare(names, costs, *limits, border, units, **sizes)
    rows = [plan.figures for plan in plans]
    if file:
        file.write([plan.drawn for plan in plans if plan.drawn])
    if config.format == "json":
        sys.stdout.write(json.dumps({**sizes, "compare": rows}) + "\n")
        return
    title = f"{config.num_ranks} ranks, {config.num_microbatches} microbatches"
    console = Console()
    console.print(comparison_table(rows, title, units))
    for row in rows:
        if "refused" in row:
            console.out(f"{row['schedule']}: {row['refused']}", highlight=False)


def _refuse_what_is_for_one(config: DictConfig) -> None:
    if config.strategy.offload != "none":
        raise ScheduleError(
            f"offload ({config.strategy.offload}) is for one schedule; in compare write it behind "
            f"a name, as in compare=[uniform,uniform+half]"
        )
    if config.options:
        raise ScheduleError(f"options ({config.options}) are for one schedule; leave out compare")

"""``pipeoffload-plan``: what a schedule would take, before anything runs.

It is a Hydra application on conf/plan.yaml. It needs no device, and of the model only its costs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lightning_pipeoffload.comparison import compare, comparison_table
from lightning_pipeoffload.configuration import run_hydra_app
from lightning_pipeoffload.figures import figures
from lightning_pipeoffload.picture_file import write_picture
from lightning_pipeoffload.schedule import (
    Costs,
    Schedule,
    ScheduleError,
    Timeline,
    accept,
    build,
    copy_ratios,
    draw,
    estimated_copy_ratio,
    free_share,
    offload_activations,
    simulate,
    with_copy_ratio,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["main", "plan"]


def plan(config: DictConfig) -> None:
    """Build and time the schedule that ``config`` names, or those to compare; print the figures.

    Args:
        config: conf/plan.yaml with the command line's overrides.

    Raises:
        ScheduleError: The schedule cannot be, or there is no such format or picture.
    """
    if config.format not in REPORTS:
        raise ScheduleError(f"format ({config.format}) must be one of {', '.join(REPORTS)}")
    costs = _costs(config)
    if config.compare:
        _compare(config, costs)
        return
    schedule, offload = _offloaded(config, costs)
    timeline = simulate(schedule, costs)
    if config.picture:
        write_picture(str(config.picture), timeline, costs, _summary(schedule, timeline))
    REPORTS[config.format](schedule, timeline, {**_copy_ratio(schedule, costs), **offload})


def _costs(config: DictConfig) -> Costs:
    """Return the costs, those of copies by the paper's formula where a layer is described."""
    costs = Costs(**_mapping(config, "costs"))
    layer = _mapping(config, "layer")
    given = [name for name in ("hidden_size", "sequence_length") if layer[name] is not None]
    if not given:
        return costs
    if len(given) < 2 or costs.offload or costs.reload:
        raise ScheduleError(
            "layer needs both hidden_size and sequence_length, and estimates costs.offload and "
            "costs.reload; give these, or those"
        )
    return with_copy_ratio(costs, estimated_copy_ratio(**layer))


def _offloaded(config: DictConfig, costs: Costs) -> tuple[Schedule, dict[str, Any]]:
    """Return the schedule, with its copies if any are asked for, and what the pass reports."""
    amount = config.strategy.offload
    if amount == "none":
        return _schedule(config, costs, config.memory_limit), {}
    schedule = _schedule(config, costs, None)
    schedule, report = offload_activations(schedule, costs, amount, config.memory_limit)
    names = (*_COUNTS, "slowdown", "reason")
    return schedule, {name: getattr(report, name) for name in names}


def _copy_ratio(schedule: Schedule, costs: Costs) -> dict[str, Any]:
    ratio = max(copy_ratios(costs, schedule.num_stages))
    share = free_share(costs, schedule.num_stages)
    return {
        "copy_ratio": ratio if isfinite(ratio) else None,
        "free_share": share,
        "full_offload_is_free": share == 1,
    }


def _schedule(config: DictConfig, costs: Costs, memory_limit: float | None) -> Schedule:
    """Build the schedule, or read it from a .csv, whose sizes are its own."""
    name = str(config.strategy.schedule)
    if not name.endswith(".csv"):
        sizes = ("num_ranks", "num_microbatches", "num_chunks")
        taken = {size: config[size] for size in sizes}
        return build(
            name, costs=costs, memory_limit=memory_limit, **taken, **_mapping(config, "options")
        )
    if not Path(name).is_file():
        raise ScheduleError(f"strategy.schedule ({name}) is no file; Schedule.to_csv writes one")
    schedule = Schedule.from_csv(name)
    accept(schedule, costs, memory_limit)
    return schedule


def _compare(config: DictConfig, costs: Costs) -> None:
    if config.picture:
        raise ScheduleError(f"picture ({config.picture}) shows one schedule; leave out compare")
    names = [config.compare] if isinstance(config.compare, str) else list(config.compare)
    sizes = {size: config[size] for size in ("num_ranks", "num_microbatches")}
    rows = compare(names, costs, config.memory_limit, config.num_chunks, **sizes)
    if config.format == "json":
        sys.stdout.write(json.dumps({**sizes, "compare": rows}) + "\n")
        return
    title = f"{config.num_ranks} ranks, {config.num_microbatches} microbatches"
    console = Console()
    console.print(comparison_table(rows, title))
    for row in rows:
        if "refused" in row:
            console.out(f"{row['schedule']}: {row['refused']}", highlight=False)


def _mapping(config: DictConfig, name: str) -> Mapping[str, Any]:
    value = config[name]
    if not isinstance(value, Mapping):
        raise ScheduleError(f"{name} ({value}) must have names and values; use {name}.NAME=VALUE")
    return value


def print_json(schedule: Schedule, timeline: Timeline, offload: dict[str, Any]) -> None:
    """Print one JSON object with the figures, and nothing else."""
    sys.stdout.write(json.dumps({**figures(schedule, timeline), **offload}) + "\n")


def print_text(schedule: Schedule, timeline: Timeline, offload: dict[str, Any]) -> None:
    """Print a table of the ranks, the figures of all together and a drawing."""
    console = Console()
    console.print(rank_table(schedule, timeline))
    console.out(
        f"makespan {timeline.makespan:g}   bubble {timeline.bubble:.4f}   "
        f"without a barrier at the optimizer {timeline.bubble_unsynchronized:.4f}\n",
        highlight=False,
    )
    if offload["copy_ratio"] != 0:
        console.out(_about_copies(offload), highlight=False)
    console.out(draw(timeline, console.width), highlight=False)


def _about_copies(offload: dict[str, Any]) -> str:
    ratio, share = offload["copy_ratio"], offload["free_share"]
    allows = (
        "full offload is free"
        if offload["full_offload_is_free"]
        else f"copies of at most {share:.0%} of the activations are hidden"
    )
    lines = [f"k {'infinite' if ratio is None else f'{ratio:.3g}'}: {allows}"]
    if "offloaded" in offload:
        ranks = zip(*(offload[name] for name in _COUNTS), strict=True)
        lines += [_of_rank(rank, *counts) for rank, counts in enumerate(ranks)]
        lines += filter(None, [f"makespan x {offload['slowdown']:.4g}", offload["reason"]])
    return "\n".join(lines) + "\n"


_COUNTS = ("wanted", "offloaded", "queued", "kept")


def _of_rank(rank: int, wanted: int, offloaded: int, queued: int, kept: int) -> str:
    queue = f", {queued} from B to W" if queued else ""
    stay = f", {kept} stay" if kept else ""
    return f"rank {rank}: of {wanted} activations {offloaded} leave from F to B{queue}{stay}"


REPORTS = {"text": print_text, "json": print_json}


def _summary(schedule: Schedule, timeline: Timeline) -> str:
    return f"{_sizes(schedule)}, bubble {timeline.bubble:.4f}"


def _sizes(schedule: Schedule) -> str:
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks of {schedule.num_chunks} stages, "
        f"{schedule.num_microbatches} microbatches"
    )


def rank_table(schedule: Schedule, timeline: Timeline) -> Table:
    """Return a table with one row per rank: seconds at work and idle, and the peak memory."""
    table = Table("rank", "stages", "busy", "idle", "peak memory", title=_sizes(schedule))
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

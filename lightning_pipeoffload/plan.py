"""``pipeoffload-plan``: what a schedule would take, before anything runs.

It is a Hydra application on conf/plan.yaml. It needs no device, and of the model only its costs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lightning_pipeoffload.comparison import compare, comparison_table
from lightning_pipeoffload.configuration import run_hydra_app
from lightning_pipeoffload.pictures.picture_file import check_picture, write_picture
from lightning_pipeoffload.plan_report import COUNTS, REPORTS, summary
from lightning_pipeoffload.schedule import (
    Costs,
    Schedule,
    ScheduleError,
    accept,
    build,
    copy_ratios,
    estimated_copy_ratio,
    free_share,
    offload_activations,
    simulate,
    with_copy_ratio,
)
from lightning_pipeoffload.settings import DEFAULT_SCHEDULE

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["main", "plan"]

_COSTS = tuple(field.name for field in fields(Costs))
_LAYER = ("hidden_size", "sequence_length", "compute_rate", "copy_rate")


def plan(config: DictConfig) -> None:
    """Build and time the schedule that ``config`` names, or those to compare; print the figures.

    Args:
        config: conf/plan.yaml with the command line's overrides.

    Raises:
        ScheduleError: The schedule cannot be, or there is no such format or picture.
    """
    if config.format not in REPORTS:
        raise ScheduleError(f"format ({config.format}) must be one of {', '.join(REPORTS)}")
    _refuse_what_a_run_measures(config)
    costs = _costs(config)
    if config.compare:
        _compare(config, costs)
        return
    if config.picture:
        check_picture(str(config.picture))
    schedule, offload = _offloaded(config, costs)
    timeline = simulate(schedule, costs)
    if config.picture:
        write_picture(str(config.picture), timeline, costs, summary(schedule, timeline))
    REPORTS[config.format](schedule, timeline, {**_copy_ratio(schedule, costs), **offload})


def _refuse_what_a_run_measures(config: DictConfig) -> None:
    """Refuse arguments of the strategy that mean nothing for costs that are given."""
    limit, recompute = config.strategy.memory_limit, config.strategy.recompute
    if limit is not None:
        raise ScheduleError(
            f"strategy.memory_limit ({limit}) is in bytes, of a run; here set memory_limit, in the "
            f"unit of costs.activation"
        )
    if recompute != "none":
        raise ScheduleError(
            f"strategy.recompute ({recompute}) is of a run; here it is in the costs that are "
            f"given: a smaller costs.activation, a larger costs.backward_input"
        )


def _costs(config: DictConfig) -> Costs:
    """Return the costs, those of copies by the paper's formula where a layer is described."""
    costs = Costs(**_mapping(config, "costs", _COSTS))
    layer = _mapping(config, "layer", _LAYER)
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
    names = (*COUNTS, "slowdown", "reason")
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
    if name.endswith(".csv"):
        if not Path(name).is_file():
            raise ScheduleError(
                f"strategy.schedule ({name}) is no file; Schedule.to_csv writes one"
            )
        schedule = Schedule.from_csv(name)
        accept(schedule, costs, memory_limit)
        return schedule
    sizes = {size: config[size] for size in ("num_ranks", "num_microbatches", "num_chunks")}
    given = {**sizes, "costs": costs, "memory_limit": memory_limit}
    options = _mapping(config, "options")
    for option in options:
        if option in given:
            raise ScheduleError(f"options.{option} has a place of its own; set {option}")
    return build(DEFAULT_SCHEDULE if name == "auto" else name, **given, **options)


def _compare(config: DictConfig, costs: Costs) -> None:
    _refuse_beside_compare(config)
    named = config.compare
    is_list = isinstance(named, Sequence) and not isinstance(named, str)
    names = map(str, named if is_list else [named])
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


def _refuse_beside_compare(config: DictConfig) -> None:
    """Refuse what is for one schedule."""
    if config.picture:
        raise ScheduleError(f"picture ({config.picture}) shows one schedule; leave out compare")
    if config.strategy.offload != "none":
        raise ScheduleError(
            f"offload ({config.strategy.offload}) is for one schedule; in compare write it behind "
            f"a name, as in compare=[uniform,uniform+half]"
        )
    if config.options:
        raise ScheduleError(f"options ({config.options}) are for one schedule; leave out compare")


def _mapping(
    config: DictConfig, name: str, known: Collection[str] | None = None
) -> Mapping[str, Any]:
    values = config[name]
    if not isinstance(values, Mapping):
        raise ScheduleError(f"{name} ({values}) must have names and values; use {name}.NAME=VALUE")
    for key in values:
        if known is not None and key not in known:
            raise ScheduleError(f"{name}.{key} is unknown; {name} has {', '.join(known)}")
    return values


def main() -> None:
    """Run the console script ``pipeoffload-plan``."""
    run_hydra_app("plan", plan)


if __name__ == "__main__":
    main()

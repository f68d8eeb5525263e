"""``pipeoffload-plan``: what a schedule would take, before anything runs.

It is a Hydra application on conf/plan.yaml. It needs no device, and of the model only its costs;
or the model itself, from whose shapes it says what each rank needs of memory.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_pipeoffload.cli.auto_plan import (
    choose,
    costs_by_option,
    describe,
    print_choice,
)
from lightning_pipeoffload.cli.border_options import BorderOptions
from lightning_pipeoffload.cli.comparison import (
    costs_of_stage,
    stages_per_rank,
    with_reductions,
)
from lightning_pipeoffload.cli.comparison_report import report_comparison
from lightning_pipeoffload.cli.configuration import run_hydra_app
from lightning_pipeoffload.cli.costs_file import read_costs
from lightning_pipeoffload.cli.memory_sweep import print_sweep, sweep_memory_limit
from lightning_pipeoffload.cli.plan_report import REPORTS, figures_of
from lightning_pipeoffload.cli.planned_steps import PlannedSteps
from lightning_pipeoffload.cli.units import MEASURED, Units
from lightning_pipeoffload.pictures.picture_file import PictureFile
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
    split_fused_backward,
    with_copy_ratio,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["main", "plan"]

_COSTS = tuple(field.name for field in fields(Costs))
_PICTURE = ("path", "steps", "microbatches", "time")
_LAYER = ("hidden_size", "sequence_length", "compute_rate", "copy_rate")


def plan(config: DictConfig) -> None:
    """Build and time the schedule that ``config`` names, or those to compare; print the figures.

    Args:
        config: Conf/plan.yaml with the command line's overrides.

    Raises:
        ScheduleError: The schedule cannot be, or there is no such format or picture.
    """
    if config.format not in REPORTS:
        raise ScheduleError(f"format ({config.format}) must be one of {', '.join(REPORTS)}")
    if config.device is not None:
        _plan_for_device(config)
        return
    if config.get("model") is not None:
        _estimate_model(config)
        return
    if config.device_memory is not None:
        raise ScheduleError(
            f"device_memory ({config.device_memory}) is for a model, whose bytes are known: "
            f"model=NAME; without one set memory_limit, in the unit of costs.activation"
        )
    _refuse_what_a_run_measures(config)
    costs = _costs(config)
    units = MEASURED if config.costs_file else Units.of(costs)
    file = _picture_file(config, units)
    if config.sweep is not None:
        if file is not None:
            raise ScheduleError(
                f"picture ({file.path}) has no part in a sweep, which prints a table; leave it out"
            )
        sweep = sweep_memory_limit(config, costs_by_option(costs), units)
        print_sweep(sweep, config.format == "json")
        return
    if config.compare:
        report_comparison(config, costs, file)
        return
    if config.strategy.schedule == "auto":
        schedule, costs, offload = _chosen(config, costs, units)
    else:
        given = _given_schedule(config)
        costs = costs_of_stage(costs, given.num_chunks if given else _num_chunks(config))
        schedule, offload = _offloaded(config, given, costs)
    planned = PlannedSteps(with_reductions(schedule, costs), costs, BorderOptions.of(config))
    _report(config, planned, offload, units, file)


def _report(
    config: DictConfig,
    planned: PlannedSteps,
    told: dict[str, Any],
    units: Units,
    file: PictureFile | None,
) -> None:
    if file:
        file.write([planned.drawn(units)])
    ratio = _copy_ratio(planned.schedule, planned.costs)
    REPORTS[config.format](planned, {**ratio, **told}, units)


def _plan_for_device(config: DictConfig) -> None:
    """Plan a model for a device by its data sheet, which takes torch and the package itself."""
    if config.get("model") is None:
        raise ScheduleError(
            f"device ({config.device}) is for a model, whose operations are counted: add model=NAME"
        )
    others = {"costs_file": config.costs_file, "sweep": config.sweep, "compare": config.compare}
    for name, value in others.items():
        if value:
            raise ScheduleError(
                f"{name} ({value}) has no part in a plan for a device; leave it out"
            )
    if config.memory_limit is not None:
        raise ScheduleError(
            f"memory_limit ({config.memory_limit}) follows from the device, less what weights "
            f"take; set device_memory, as in device_memory=40GiB"
        )
    units = MEASURED
    file = _picture_file(config, units)
    _load_package()
    from lightning_pipeoffload.cli.model_plan import plan_for_device  # noqa: PLC0415 - as above

    schedule, costs, told = plan_for_device(config)
    planned = PlannedSteps(schedule, costs, BorderOptions.of(config))
    _report(config, planned, told, units, file)


def _estimate_model(config: DictConfig) -> None:
    """Answer for a model, which takes torch and the package itself."""
    no_costs = config.costs_file is None and config.sweep is None
    if config.strategy.schedule == "auto" or not no_costs:
        raise ScheduleError(
            "schedule=auto, sweep and costs_file are for costs, and a model's shapes tell no "
            "seconds: add device=h100, or leave out model, and give what pipeoffload-rehearse "
            "costs_file=FILE has measured of it"
        )
    _load_package()
    from lightning_pipeoffload.cli.model_plan import estimate_model  # noqa: PLC0415 - as above

    estimate_model(config)


def _load_package() -> None:
    package = sys.modules["lightning_pipeoffload"]
    if not hasattr(package, "PipeOffloadStrategy"):  # the script has not run it
        assert package.__spec__ is not None
        assert package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)


def _picture_file(config: DictConfig, units: Units) -> PictureFile | None:
    """Return where to draw; None: nowhere."""
    if isinstance(config.picture, str):  # composed in Python, where main() has not seen it
        return PictureFile(Path(config.picture), unit=units.time)
    wanted = _mapping(config, "picture", _PICTURE)
    path, shown = wanted["path"], {name: wanted[name] for name in ("microbatches", "time")}
    if path is None:
        for name, value in {"steps": wanted["steps"], **shown}.items():
            if value is not None:
                raise ScheduleError(f"picture.{name} ({value}) needs a file to draw: picture=FILE")
        return None
    return PictureFile(Path(str(path)), **shown, unit=units.time)


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
    if config.costs_file is not None:
        costs = read_costs(str(config.costs_file))
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


def _chosen(
    config: DictConfig, costs: Costs, units: Units
) -> tuple[Schedule, Costs, dict[str, Any]]:
    """Return the fastest plan that fits, its costs, and what JSON says of it; print the others."""
    plan = choose(config, costs)
    if config.format == "text":
        print_choice(plan, units)
    return split_fused_backward(plan.schedule), plan.costs, describe(plan)


def _offloaded(
    config: DictConfig, given: Schedule | None, costs: Costs
) -> tuple[Schedule, dict[str, Any]]:
    """Return the schedule, with its copies if any are asked for, and what the pass reports."""
    amount = config.strategy.offload
    if amount == "none":
        return _schedule(config, given, costs, config.memory_limit), {}
    schedule = _schedule(config, given, costs, None)
    schedule, report = offload_activations(schedule, costs, amount, config.memory_limit)
    return schedule, figures_of(report)


def _copy_ratio(schedule: Schedule, costs: Costs) -> dict[str, Any]:
    ratio = max(copy_ratios(costs, schedule.num_stages))
    share = free_share(costs, schedule.num_stages)
    return {
        "copy_ratio": ratio if isfinite(ratio) else None,
        "free_share": share,
        "full_offload_is_free": share == 1,
    }


def _name(config: DictConfig) -> str:
    return str(config.strategy.schedule)


def _num_chunks(config: DictConfig) -> int:
    wanted = config.num_chunks
    return stages_per_rank(_name(config), wanted if isinstance(wanted, int) else None)


def _given_schedule(config: DictConfig) -> Schedule | None:
    """Read the schedule from a .csv, whose sizes are its own; None: it is to be built."""
    name = _name(config)
    if not name.endswith(".csv"):
        return None
    if not Path(name).is_file():
        raise ScheduleError(f"strategy.schedule ({name}) is no file; Schedule.to_csv writes one")
    return Schedule.from_csv(name)


def _schedule(
    config: DictConfig, given: Schedule | None, costs: Costs, memory_limit: float | None
) -> Schedule:
    """Build the schedule, or check the given one."""
    if given is not None:
        accept(given, costs, memory_limit)
        return given
    sizes = {size: config[size] for size in ("num_ranks", "num_microbatches", "num_chunks")}
    has_place = {**sizes, "costs": costs, "memory_limit": memory_limit}
    options = _mapping(config, "options")
    for option in options:
        if option in has_place:
            raise ScheduleError(f"options.{option} has a place of its own; set {option}")
    return build(_name(config), **has_place, **options)


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
    # As `python -m` has it: the module that a configuration names may lie in the current folder.
    sys.path.insert(0, str(Path.cwd()))
    # Hydra would put the path in the place of the group, and find no picture.microbatches in it.
    sys.argv[1:] = [re.sub("^picture=(?!{)", "picture.path=", word) for word in sys.argv[1:]]
    run_hydra_app("plan", plan)


if __name__ == "__main__":
    main()

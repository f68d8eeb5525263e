"""``pipeoffload-plan``: what a schedule would take, before anything runs.

It is a Hydra application on conf/plan.yaml. It needs no device, and of the model only its costs;
or the model itself, from whose shapes it says what each rank needs of memory.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_pipeoffload.cli.configuration import run_hydra_app
from lightning_pipeoffload.cli.given_plan import GivenPlans, mapping, parse_name, steps_of
from lightning_pipeoffload.cli.memory_sweep import print_sweep, sweep_memory_limit
from lightning_pipeoffload.cli.plan_output import (
    MEASURED,
    PlannedSteps,
    Units,
    describe,
    describe_offload,
    print_choice,
    print_comparison,
    print_plan,
)
from lightning_pipeoffload.pictures.picture_file import PictureFile
from lightning_pipeoffload.schedule import ScheduleError, split_fused_backward

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["main", "plan"]

_FORMATS = ("text", "json")
_PICTURE = ("path", "steps", "microbatches", "time")


def plan(config: DictConfig) -> None:
    """Build and time the schedule that ``config`` names, or those to compare; print the figures.

    Args:
        config: Conf/plan.yaml with the command line's overrides.

    Raises:
        ScheduleError: The schedule cannot be, or there is no such format or picture.
    """
    if config.format not in _FORMATS:
        raise ScheduleError(f"format ({config.format}) must be one of {', '.join(_FORMATS)}")
    if config.device is not None or config.get("model") is not None:
        _plan_model(config)
        return
    if config.device_memory is not None:
        raise ScheduleError(
            f"device_memory ({config.device_memory}) is for a model, whose bytes are known: "
            f"model=NAME; without one set memory_limit, in the unit of costs.activation"
        )
    given = GivenPlans(config)
    file = _picture_file(config, given.units)
    is_json = config.format == "json"
    if config.sweep is not None:
        if file is not None:
            raise ScheduleError(
                f"picture ({file.path}) has no part in a sweep, which prints a table; leave it out"
            )
        print_sweep(sweep_memory_limit(config, given), is_json)
    elif config.compare:
        _compare(config, given, file)
    elif config.strategy.schedule == "auto":
        best = given.chosen()
        if not is_json:
            print_choice(best, given.units)
        planned = given.timed(split_fused_backward(best.schedule), best.costs)
        _report(planned, describe(best), given.units, file, is_json)
    elif config.strategy.schedule == "optpipe":
        _report(given.timed(*given.solved()), {}, given.units, file, is_json)
    else:
        planned, made = given.named(str(config.strategy.schedule), config.strategy.offload)
        _report(planned, describe_offload(made.report), given.units, file, is_json)


def _report(
    planned: PlannedSteps,
    told: dict[str, Any],
    units: Units,
    file: PictureFile | None,
    is_json: bool,
) -> None:
    if file:
        file.write([planned.drawn(units)])
    print_plan(planned, told, units, is_json)


def _compare(config: DictConfig, given: GivenPlans, file: PictureFile | None) -> None:
    """Put schedules side by side, for the same work of every rank."""
    if config.strategy.offload != "none":
        raise ScheduleError(
            f"offload ({config.strategy.offload}) is for one schedule; in compare write it behind "
            f"a name, as in compare=[uniform,uniform+half]"
        )
    if config.options:
        raise ScheduleError(f"options ({config.options}) are for one schedule; leave out compare")
    named = config.compare
    is_list = isinstance(named, Sequence) and not isinstance(named, str)
    rows: list[dict[str, Any]] = []
    drawn: list[PlannedSteps] = []
    for name in map(str, named if is_list else [named]):
        base, amount = parse_name(name)
        try:
            planned, _ = given.named(base, amount or "none")
        except ScheduleError as error:
            rows.append({"schedule": name, "refused": str(error).partition("\n")[0]})
        else:
            drawn.append(replace(planned, schedule=replace(planned.schedule, name=name)))
            rows.append(drawn[-1].figures())
    if not drawn:
        raise ScheduleError(rows[0]["refused"])
    if file:
        file.write([planned.drawn(given.units) for planned in drawn])
    sizes = {size: config[size] for size in ("num_ranks", "num_microbatches")}
    title = f"{config.num_ranks} ranks, {config.num_microbatches} microbatches"
    print_comparison(rows, title, given.units, sizes if config.format == "json" else None)


def _plan_model(config: DictConfig) -> None:
    """Answer for a model, which takes torch and the package itself."""
    if config.get("model") is None:
        raise ScheduleError(
            f"device ({config.device}) is for a model, whose operations are counted: add model=NAME"
        )
    if config.device is None:
        _estimate_model(config)
        return
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
    file = _picture_file(config, MEASURED)
    _load_package()
    from lightning_pipeoffload.cli.model_plan import plan_for_device  # noqa: PLC0415 - as above

    schedule, costs, told = plan_for_device(config)
    planned = PlannedSteps(schedule, costs, steps_of(config))
    _report(planned, told, MEASURED, file, config.format == "json")


def _estimate_model(config: DictConfig) -> None:
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
    wanted = mapping(config, "picture", _PICTURE)
    path, shown = wanted["path"], {name: wanted[name] for name in ("microbatches", "time")}
    if path is None:
        for name, value in {"steps": wanted["steps"], **shown}.items():
            if value is not None:
                raise ScheduleError(f"picture.{name} ({value}) needs a file to draw: picture=FILE")
        return None
    return PictureFile(Path(str(path)), **shown, unit=units.time)


def main() -> None:
    """Run the console script ``pipeoffload-plan``."""
    # As `python -m` has it: the module that a configuration names may lie in the current folder.
    sys.path.insert(0, str(Path.cwd()))
    # Hydra would put the path in the place of the group, and find no picture.microbatches in it.
    sys.argv[1:] = [re.sub("^picture=(?!{)", "picture.path=", word) for word in sys.argv[1:]]
    run_hydra_app("plan", plan)


if __name__ == "__main__":
    main()

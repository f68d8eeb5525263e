"""``pipeoffload-plan``: what a schedule would take, before anything runs.

It is a Hydra application on conf/plan.yaml. It needs no device, and of the model only its costs;
or the model itself, from whose shapes it says what each rank needs of memory.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_pipeoffload.cli.configuration import load_package, run_hydra_app
from lightning_pipeoffload.cli.given_plan import GivenPlans, mapping
from lightning_pipeoffload.cli.plan_output import picture_of_steps, print_answer
from lightning_pipeoffload.pictures import PictureFile
from lightning_pipeoffload.planning.figures import MEASURED, PlannedStep, Units
from lightning_pipeoffload.schedule import ScheduleError, check_positive_integers

if TYPE_CHECKING:
    from omegaconf import DictConfig

_FORMATS = ("text", "json")
_NUM_RANKS = 4  # of conf/plan.yaml
# What counts only with a device, with the values of conf/plan.yaml.
_ONLY_WITH_A_DEVICE = {
    **{"host_bandwidth": None, "link": None, "network": None},
    **{"efficiency": 0.5, "devices_per_machine": 8, "float16_sums": False},
}
# What is searched with devices, unless the command line has it. Of other arguments of the strategy,
# which conf/plan.yaml does not have, those that are given are kept.
_SEARCHED = ("num_ranks", "tensor_parallel_size", "schedule", "offload", "strategy.recompute")
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
    for name, unset in _ONLY_WITH_A_DEVICE.items():
        if config.device is None and config[name] != unset:
            raise ScheduleError(
                f"{name} ({config[name]}) counts only with a device; add device=h100 and "
                f"model=NAME, or leave it out"
            )
    _check_device_list(config)
    _check_devices(config)
    _check_tensor_ranks(config)
    if config.device is not None or config.get("model") is not None:
        _plan_model(config)
        return
    if config.device_memory is not None:
        raise ScheduleError(
            f"device_memory ({config.device_memory}) is for a model, whose bytes are known: "
            f"model=NAME; without one set memory_limit, in the unit of costs.activation"
        )
    plans = GivenPlans(config)
    picture = _Picture(config, plans.units)
    if config.sweep is not None:
        if picture.file is not None:
            raise ScheduleError(
                f"picture ({picture.file.path}) has no part in a sweep, which prints a table; "
                f"leave it out"
            )
        answer = plans.sweep()
    else:
        answer = plans.compare() if config.compare else plans.plan()
    picture.draw(answer.steps)
    print_answer(answer, config.format == "json")


def _check_devices(config: DictConfig) -> None:
    if config.devices is None:
        searched = {name: config[name] for name in ("num_ranks", "tensor_parallel_size")}
        for name in ("data_parallel_size", "recompute"):
            searched[f"strategy.{name}"] = config.strategy.get(name)
        for name, value in searched.items():
            if value == "auto":
                raise ScheduleError(
                    f"{name} (auto) is searched for a number of devices: add devices=8, or write a "
                    f"value"
                )
        for name, unset in {"num_nodes": 1, "seconds": None}.items():
            if config[name] != unset:
                raise ScheduleError(
                    f"{name} ({config[name]}) is for a search of layouts: add devices=8, the "
                    f"devices of each machine, or leave it out"
                )
        return
    check_positive_integers(devices=config.devices, num_nodes=config.num_nodes)
    seconds = config.seconds
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is not None and not (is_number and 0 < seconds < inf):
        raise ScheduleError(f"seconds ({seconds}) must be a number above 0, as in seconds=60")
    if config.device is None or config.get("model") is None:
        raise ScheduleError(
            f"devices ({config.devices}) is for a model and a device, whose layouts are searched: "
            f"add model=NAME device=h100, or leave it out"
        )
    per_machine = config.devices_per_machine
    if per_machine not in (_ONLY_WITH_A_DEVICE["devices_per_machine"], config.devices):
        raise ScheduleError(
            f"devices_per_machine ({per_machine}) is devices ({config.devices}) where layouts are "
            f"searched; leave it out"
        )


def _check_device_list(config: DictConfig) -> None:
    """Check the arguments of a list of devices."""
    if config.device is None or isinstance(config.device, (str, int)):
        return
    count, listed = len(config.device), f"device ({','.join(map(str, config.device))})"
    if not count:
        raise ScheduleError("device has no entry; write device=[rtx4090,rtx3090], or one device")
    if config.devices is not None:
        raise ScheduleError(
            f"{listed} is a list, and layouts are searched for one kind of device: leave out "
            f"devices ({config.devices}), for the list is a pipeline"
        )
    if config.num_ranks not in (_NUM_RANKS, count):
        raise ScheduleError(
            f"num_ranks ({config.num_ranks}) is not the number of entries of {listed}; leave it out"
        )
    if config.tensor_parallel_size != 1:
        raise ScheduleError(
            f"tensor_parallel_size ({config.tensor_parallel_size}) shares layers among devices of "
            f"one name, and {listed} is a list; leave it out"
        )


def _check_tensor_ranks(config: DictConfig) -> None:
    size = config.tensor_parallel_size
    if size == "auto":  # with devices
        return
    check_positive_integers(tensor_parallel_size=size)
    if size > 1 and config.get("model") is None:
        raise ScheduleError(
            f"tensor_parallel_size ({size}) is for a model, whose layers it divides: add "
            f"model=NAME, or leave it out, and give costs of one of the ranks that share a stage"
        )


def _plan_model(config: DictConfig) -> None:
    """Plan a model, which takes torch and the package itself."""
    if config.get("model") is None:
        raise ScheduleError(
            f"device ({config.device}) is for a model, whose operations are counted: add model=NAME"
        )
    if "_target_" not in mapping(config, "model"):
        raise ScheduleError(
            f"model ({config.model}) names no class; add model=gpt_tiny or "
            f"+model._target_=my_package.MyModule"
        )
    has_no_times = config.device is None
    if has_no_times and (config.strategy.schedule == "auto" or config.costs_file or config.sweep):
        raise ScheduleError(
            "schedule=auto, sweep and costs_file are for costs, and a model's shapes tell no "
            "seconds: add device=h100, or leave out model, and give what pipeoffload-rehearse "
            "costs_file=FILE has measured of it"
        )
    if config.options:
        raise ScheduleError(f"options ({config.options}) are for a plan by costs; leave them out")
    if config.memory_limit is not None:
        raise ScheduleError(
            f"memory_limit ({config.memory_limit}) is for a plan by costs; set device_memory, of "
            f"which weights take their part, as in device_memory=40GiB"
        )
    picture = _Picture(config, MEASURED)
    if has_no_times:
        if picture.file is not None:
            raise ScheduleError(
                f"picture ({picture.file.path}) shows times, and a model's shapes tell none: add "
                f"device=h100, or leave it out"
            )
        load_package()
        from lightning_pipeoffload.cli.model_plan import (  # noqa: PLC0415 - imports torch
            estimate_model,
        )

        print_answer(estimate_model(config), config.format == "json")
        return
    others = {"costs_file": config.costs_file, "sweep": config.sweep, "compare": config.compare}
    for name, value in others.items():
        if value:
            raise ScheduleError(
                f"{name} ({value}) has no part in a plan for a device; leave it out"
            )
    load_package()
    from lightning_pipeoffload.cli.model_plan import (  # noqa: PLC0415 - imports torch
        plan_for_device,
    )

    answer = plan_for_device(config)
    picture.draw(answer.steps)
    print_answer(answer, config.format == "json")


class _Picture:
    """The picture that is asked for, if any; ``file`` is None where there is none to draw."""

    def __init__(self, config: DictConfig, units: Units) -> None:
        self._units = units
        self._num_steps, self.file = 1, None
        if isinstance(config.picture, str):  # composed in Python, not by main()
            self.file = PictureFile(Path(config.picture), unit=units.time)
            return
        wanted = mapping(config, "picture", _PICTURE)
        steps, shown = wanted["steps"], {n: wanted[n] for n in ("microbatches", "time")}
        if steps is not None and (not isinstance(steps, int) or steps < 1):
            raise ScheduleError(f"picture.steps ({steps}) must be a whole number from 1 on")
        if wanted["path"] is not None:
            self.file = PictureFile(Path(str(wanted["path"])), **shown, unit=units.time)
            self._num_steps = steps or 1
            return
        for name, value in {"steps": steps, **shown}.items():
            if value is not None:
                raise ScheduleError(f"picture.{name} ({value}) needs a file to draw: picture=FILE")

    def draw(self, steps: Sequence[PlannedStep]) -> None:
        if self.file is not None:
            self.file.write(
                [picture_of_steps(step, self._units, self._num_steps) for step in steps]
            )


def add_auto_overrides(words: Sequence[str]) -> list[str]:
    """Return a command line that with ``devices`` has "auto" for what is searched unless given."""
    names = [word.lstrip("+").partition("=")[0] for word in words]
    values = dict(zip(names, words, strict=True))
    if values.get("devices", "=null").partition("=")[2] == "null":
        return [*words]
    return [*(f"{name}=auto" for name in _SEARCHED if name not in values), *words]


def main() -> None:
    """Run the console script ``pipeoffload-plan``."""
    # Plans are millions of tuples, none in a cycle, which the collector visits again and again:
    # a third of the time of a large layout.
    gc.set_threshold(1_000_000)
    # Hydra would replace the group by the path, and find no picture.microbatches in it.
    sys.argv[1:] = [re.sub("^picture=(?!{)", "picture.path=", word) for word in sys.argv[1:]]
    sys.argv[1:] = add_auto_overrides(sys.argv[1:])
    run_hydra_app("plan", plan)


if __name__ == "__main__":
    main()

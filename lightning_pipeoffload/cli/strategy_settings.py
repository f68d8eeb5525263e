"""The strategy's arguments in a command's configuration: each counts, or is refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.schedule import ScheduleError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def settings_of(
    config: DictConfig, counting: Collection[str], instead: Mapping[str, str], **chosen: Any
) -> PipelineSettings:
    """Return the strategy's arguments that a command's configuration has.

    Args:
        config: The configuration, with ``num_microbatches`` and ``num_chunks`` with ``strategy``.
        counting: The arguments by which the command goes.
        instead: Of others, what to write instead.
        **chosen: Arguments that the command chooses itself.

    Raises:
        ScheduleError: An argument is given that changes nothing, or is unknown.
        ValueError: An argument has a value that it cannot have.
    """
    arguments: Any = OmegaConf.to_container(config.strategy, resolve=True)
    defaults = {field.name: field.default for field in fields(PipelineSettings)}
    for name, value in arguments.items():
        if name not in defaults:
            raise ScheduleError(f"strategy.{name} ({value}) is no argument that a plan goes by")
        if name not in counting and value != defaults[name]:
            what = instead.get(name, "leave it out")
            raise ScheduleError(f"strategy.{name} ({value}) changes nothing here; {what}")
    arguments["num_microbatches"] = config.num_microbatches
    arguments["num_chunks"] = "auto" if config.num_chunks is None else config.num_chunks
    return PipelineSettings(**{**arguments, **chosen})


def with_values(config: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """Return a configuration with other values, by their names on the command line."""
    changed = deepcopy(config)
    for name, value in values.items():
        OmegaConf.update(changed, name, value, force_add=True)
    return changed

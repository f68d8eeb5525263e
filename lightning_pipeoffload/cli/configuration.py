"""Where the configuration is, and how a command runs with it: Hydra, with errors of one line.

Hydra is an extra. It is imported when a command runs, so that a missing one is a message and not a
traceback.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lightning_pipeoffload.cli.job_folders import SweepJobError

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["build", "configuration_directory", "run_hydra_app"]

REFUSED = 2
"""Exit status for a plan or a configuration that cannot be."""

FAILED = 1
"""Exit status for a sweep of which a job has failed."""

_EXTRA_SLURM = "; pip install lightning-pipeoffload[slurm]"

FULL_ERROR = "HYDRA_FULL_ERROR"
"""Hydra's environment variable: with 1, errors are raised and show where they come from."""


def configuration_directory() -> Path:
    """Return the directory of the configuration groups: in the wheel, or in the repository."""
    package = Path(__file__).parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def build(config: DictConfig, key: str, **arguments: Any) -> Any:
    """Return the object that ``config[key]`` describes, with ``arguments`` beside its own.

    Raises:
        ValueError: The object refuses its arguments; the message starts with ``key``.
    """
    from hydra.errors import InstantiationException  # noqa: PLC0415 - Hydra is an extra
    from hydra.utils import instantiate  # noqa: PLC0415

    try:
        return instantiate(config[key], **arguments)
    except InstantiationException as error:
        message = " ".join(str(error.__cause__ or error).split())
        raise ValueError(f"{key}: {message}") from error


def run_hydra_app(config_name: str, task: Callable[[DictConfig], None]) -> None:
    """Run a command with its configuration and the overrides of the command line.

    A configuration that does not compose, and a ``ValueError`` of the task, end the process with
    status 2 and one line on standard error; with ``HYDRA_FULL_ERROR=1`` they show their traceback.

    Args:
        config_name: A file of the configuration directory, without its ending.
        task: What to run; it is given the composed configuration.
    """
    if importlib.util.find_spec("hydra") is None:
        _refuse("this command needs Hydra; pip install lightning-pipeoffload[hydra]")
    import hydra  # noqa: PLC0415 - see the module's docstring

    directory = str(configuration_directory())
    app = hydra.main(version_base=None, config_path=directory, config_name=config_name)

    @functools.wraps(task)
    def own_task(config: DictConfig) -> None:
        _leave_demo_arguments(config)
        task(config)

    if os.environ.get(FULL_ERROR) == "1":
        app(own_task)()
        return

    @functools.wraps(task)
    def refusing_task(config: DictConfig) -> None:
        os.environ.pop(FULL_ERROR, None)
        with _refusals_of_one_line(config_name):
            own_task(config)

    # Hydra prints several lines for what it cannot compose, unless it is told to raise.
    os.environ[FULL_ERROR] = "1"
    try:
        with _refusals_of_one_line(config_name):
            app(refusing_task)()
    finally:
        os.environ.pop(FULL_ERROR, None)


def _leave_demo_arguments(config: DictConfig) -> None:
    """Leave out the arguments of a demo's class where the command line names another class."""
    from hydra.core.hydra_config import HydraConfig  # noqa: PLC0415 - see the module's docstring
    from omegaconf import open_dict  # noqa: PLC0415

    given = [one.lstrip("+").partition("=")[0] for one in HydraConfig.get().overrides.task]
    for group in ("model", "data"):
        if f"{group}._target_" in given:
            with open_dict(config):
                for name in [*config[group]]:
                    if not any(f"{one}.".startswith(f"{group}.{name}.") for one in given):
                        del config[group][name]


@contextmanager
def _refusals_of_one_line(config_name: str) -> Iterator[None]:
    from hydra.errors import HydraException  # noqa: PLC0415 - see the module's docstring
    from omegaconf.errors import OmegaConfBaseException  # noqa: PLC0415

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        message, *_ = str(error).partition("Config search path:")
        message = _name_similar(message, config_name)
        is_missing = "Could not find 'hydra/launcher/submitit_slurm'" in message
        _refuse(" ".join(message.split()) + (_EXTRA_SLURM if is_missing else ""))
    except ValueError as error:
        # What follows the first line is a drawing of the place.
        _refuse(str(error).partition("\n")[0])
    except SweepJobError as error:
        _refuse(str(error), FAILED)


def _name_similar(message: str, config_name: str) -> str:
    """Let the refusal of an unknown name end with one that is there, if one is like it."""
    from hydra import compose, initialize_config_dir  # noqa: PLC0415 - see the module's docstring
    from omegaconf import OmegaConf  # noqa: PLC0415

    found = re.match(r"Could not override '([^']+)'", message)
    if found is None:
        return message
    path, _, name = found[1].rpartition(".")
    with initialize_config_dir(str(configuration_directory()), version_base=None):
        there = OmegaConf.select(compose(config_name), path) if path else compose(config_name)
    groups = [] if path else [each.name for each in configuration_directory().iterdir()]
    names = {*groups, *(map(str, there) if isinstance(there, Mapping) else ())}
    similar = get_close_matches(name, names, n=1)
    place = f"{path}." if path else ""
    return f"{found[0]}; did you mean {place}{similar[0]}?" if similar else message


def _refuse(message: str, status: int = REFUSED) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    raise SystemExit(status)

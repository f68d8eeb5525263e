"""Runs a command with its Hydra configuration; errors are one line, and help needs no Hydra.

Hydra is an extra, torch takes seconds: both are imported where they are needed.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
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

REFUSED = 2
"""Exit status for a plan or a configuration that cannot be."""

FAILED = 1
"""Exit status for a sweep of which a job has failed."""

_EXTRA_SLURM = "; pip install lightning-pipeoffload[slurm]"

FULL_ERROR = "HYDRA_FULL_ERROR"
"""Hydra's environment variable: with 1, errors are raised and show where they come from."""

_HELP = """\
{header}
Arguments are NAME=VALUE, each with its default.{groups}

{values}

--cfg job prints the configuration that a command line composes, --hydra-help Hydra's own options.
"""


def configuration_directory() -> Path:
    """Return the directory of the configuration groups: in the wheel, or in the repository."""
    package = Path(__file__).parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def load_package() -> None:
    """Run the package's ``__init__``, which the console scripts have left out (it needs torch)."""
    package = sys.modules["lightning_pipeoffload"]
    if not hasattr(package, "PipeOffloadStrategy"):
        assert package.__spec__ is not None
        assert package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)


def build(config: DictConfig, key: str, **arguments: Any) -> Any:
    """Return the object that ``config[key]`` describes, with ``arguments`` in addition to its own.

    Raises:
        ValueError: The object refuses its arguments; the message starts with ``key``.
    """
    from hydra.errors import InstantiationException  # noqa: PLC0415 - see the module's docstring
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
        task: The command; its argument is the composed configuration.
    """
    if {"-h", "--help"} & {*sys.argv[1:]}:
        sys.stdout.write(_help_of(config_name))
        return
    if importlib.util.find_spec("hydra") is None:
        _exit_with_message("this command needs Hydra; pip install lightning-pipeoffload[hydra]")
    import hydra  # noqa: PLC0415 - see the module's docstring

    # Modules that a configuration names may lie in the current folder, as with `python -m`.
    sys.path.insert(0, str(Path.cwd()))
    # argparse takes no overrides after a flag that stands between them.
    sweeps = [word for word in sys.argv[1:] if word in ("-m", "--multirun")]
    sys.argv[1:] = sweeps + [word for word in sys.argv[1:] if word not in sweeps]
    directory = str(configuration_directory())
    app = hydra.main(version_base=None, config_path=directory, config_name=config_name)
    is_short = os.environ.get(FULL_ERROR) != "1"

    @functools.wraps(task)
    def own_task(config: DictConfig) -> None:
        if is_short:
            os.environ.pop(FULL_ERROR, None)
        with _exiting_on_errors(config_name, is_short):
            _leave_demo_arguments(config)
            task(config)

    # Without this variable Hydra prints a long trace for an invalid configuration.
    os.environ[FULL_ERROR] = "1"
    try:
        with _exiting_on_errors(config_name, is_short):
            app(own_task)()
    finally:
        if is_short:
            os.environ.pop(FULL_ERROR, None)


def _help_of(config_name: str) -> str:
    """Return the command's groups and values with the comments of its configuration files."""
    folder = configuration_directory()
    header, _, text = (folder / f"{config_name}.yaml").read_text().partition("defaults:\n")
    groups = []
    for group, default, comment in re.findall(r"^ +- (\w+): (\S+) *(.*)$", text, re.MULTILINE):
        names = " ".join(_names_in(group))
        groups.append(f"\n{group}={default}   ({names})")
        groups += [f"    {comment}"] * bool(comment)
        file = folder / group / f"{default}.yaml"
        lines = file.read_text().splitlines() if file.is_file() else []
        groups += [f"    {line}" for line in lines if line and not line.startswith("# @package")]
    _, _, values = text.partition("job_logging: none\n")
    values = values.partition("\nhydra:\n")[0].removeprefix("  - _self_\n")
    if groups:
        groups.insert(0, " Groups of them are set together by GROUP=NAME:")
    return _HELP.format(header=header[2:], groups="\n".join(groups), values=values.strip())


def _leave_demo_arguments(config: DictConfig) -> None:
    """Delete the arguments of a demo's class where the command line names another class."""
    from hydra.core.hydra_config import HydraConfig  # noqa: PLC0415 - see the module's docstring
    from omegaconf import open_dict  # noqa: PLC0415

    overrides = [one.lstrip("+").partition("=")[0] for one in HydraConfig.get().overrides.task]
    for group in ("model", "data"):
        if f"{group}._target_" in overrides:
            with open_dict(config):
                for name in [*config[group]]:
                    if not any(f"{one}.".startswith(f"{group}.{name}.") for one in overrides):
                        del config[group][name]


@contextmanager
def _exiting_on_errors(config_name: str, is_short: bool = True) -> Iterator[None]:
    from hydra.errors import HydraException  # noqa: PLC0415 - see the module's docstring
    from omegaconf.errors import OmegaConfBaseException  # noqa: PLC0415

    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError, SweepJobError) as error:
        if not is_short:
            raise
        if isinstance(error, (HydraException, OmegaConfBaseException)):
            message = _name_similar(str(error).partition("Config search path:")[0], config_name)
            is_missing = "Could not find 'hydra/launcher/submitit_slurm'" in message
            _exit_with_message(" ".join(message.split()) + (_EXTRA_SLURM if is_missing else ""))
        # After the first line there may be a drawing of the action's neighbourhood.
        is_failed = isinstance(error, SweepJobError)
        _exit_with_message(str(error).partition("\n")[0], FAILED if is_failed else REFUSED)


def _name_similar(message: str, config_name: str) -> str:
    """Add the most similar known name to the refusal of an unknown one."""
    from hydra import compose, initialize_config_dir  # noqa: PLC0415 - see the module's docstring
    from omegaconf import OmegaConf  # noqa: PLC0415

    of_group = re.search(r"Could not find '(\w+)/([^']+)'", message)
    if of_group is not None:
        group, name = of_group.groups()
        similar = get_close_matches(name.lower(), _names_in(group), n=1, cutoff=0.7)
        return f"{message.rstrip()}; did you mean {group}={similar[0]}?" if similar else message
    match = re.match(r"Could not override '([^']+)'", message)
    if match is None:
        return message
    path, _, name = match[1].rpartition(".")
    with initialize_config_dir(str(configuration_directory()), version_base=None):
        there = OmegaConf.select(compose(config_name), path) if path else compose(config_name)
    if path and there is None and (configuration_directory() / path).is_dir():
        options = ", ".join(_names_in(path))
        return f"{match[0]}: no {path} is chosen; add {path}=NAME, of {options}"
    left_out = _arguments_of(there) - {*there} if isinstance(there, Mapping) else set()
    if name in left_out:
        return f"{match[0]}, which this configuration leaves out; write +{match[1]}=VALUE"
    groups = [] if path else [each.name for each in configuration_directory().iterdir()]
    names = {*groups, *left_out, *(map(str, there) if isinstance(there, Mapping) else ())}
    similar = get_close_matches(name, names, n=1)
    if not similar:
        return message
    plus = "+" * (similar[0] in left_out)
    return f"{match[0]}; did you mean {plus}{f'{path}.' * bool(path)}{similar[0]}?"


def _arguments_of(entry: Mapping[str, Any]) -> set[str]:
    """Return the arguments of the class that an entry of the configuration names."""
    from hydra.utils import get_object  # noqa: PLC0415 - see the module's docstring

    if "_target_" not in entry:
        return set()
    return {*inspect.signature(get_object(entry["_target_"])).parameters} - {"self"}


def _names_in(group: str) -> list[str]:
    return sorted(file.stem for file in (configuration_directory() / group).glob("*.yaml"))


def _exit_with_message(message: str, status: int = REFUSED) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    raise SystemExit(status)

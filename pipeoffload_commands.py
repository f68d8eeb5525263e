"""The console scripts, which answer ``--help`` and wrong arguments without importing torch.

Importing ``lightning_pipeoffload`` registers strategies with Lightning, and that takes seconds. So
this module lies next to the package, and imports submodules of it without running its ``__init__``;
a command that needs torch runs that when a run begins (``configuration.load_package``). As
modules, ``python -m lightning_pipeoffload.train`` and ``.plan``, they are slower to answer.
"""

import importlib.util
import sys
from importlib import import_module


def _main_of(module: str) -> None:
    spec = importlib.util.find_spec("lightning_pipeoffload")
    assert spec is not None
    sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    import_module(f"{spec.name}.{module}").main()


def train() -> None:
    """Run ``pipeoffload-train``."""
    _main_of("train")


def plan() -> None:
    """Run ``pipeoffload-plan``."""
    _main_of("plan")


def rehearse() -> None:
    """Run ``pipeoffload-rehearse``."""
    _main_of("cli.rehearse")


def odc() -> None:
    """Run ``pipeoffload-odc``."""
    _main_of("cli.minibatch_balance")

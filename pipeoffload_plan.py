"""The console script ``pipeoffload-plan``: answers in a second because it imports no torch.

Whoever imports ``lightning_pipeoffload`` registers strategies with Lightning, and waits seconds for
torch before a computation that is pure Python. So this module lies beside the package, and names
the package without running its ``__init__``; what :mod:`lightning_pipeoffload.plan` imports needs
neither. ``python -m lightning_pipeoffload.plan`` is the same command, later.
"""

import importlib.util
import sys


def main() -> None:
    """Run ``pipeoffload-plan`` with the command line's overrides."""
    spec = importlib.util.find_spec("lightning_pipeoffload")
    assert spec is not None
    sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    from lightning_pipeoffload import plan  # noqa: PLC0415 - only now without torch

    plan.main()

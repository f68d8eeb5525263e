"""OR-tools' CP-SAT, which is an extra: imported where a plan is solved, and nowhere else."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

from ..actions import ScheduleError

__all__ = ["check_solver", "cp_model"]


def check_solver() -> None:
    """Check that there is a solver, without loading it.

    Raises:
        ScheduleError: OR-tools is not installed.
    """
    if find_spec("ortools") is None:
        raise ScheduleError(
            "schedule=optpipe needs OR-tools, which is not installed; run: "
            "pip install 'lightning-pipeoffload[solver]', or use schedule=auto"
        )


@cache
def cp_model() -> Any:
    """Return the module in which models are written.

    Raises:
        ScheduleError: OR-tools is not installed.
    """
    check_solver()
    from ortools.sat.python import cp_model as module  # noqa: PLC0415 - an extra

    return module

"""The process that searches for better plans during training."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from lightning_pipeoffload import schedule as schedule_package
from lightning_pipeoffload.schedule import Schedule
from lightning_pipeoffload.schedule.schedule import from_numbers
from lightning_pipeoffload.schedule.solver.plan_problem import PlanProblem
from lightning_pipeoffload.schedule.solver.serve import BOOT, request

log = logging.getLogger(__name__)


class PlanSolver:
    """A solver at low priority, on this machine; it ends with this process, however that ends.

    Args:
        problem: The costs and limits of plans.
        start: The plan in use.
        seconds: The time limit of the solver.
        folder: The folder of plans that were found; None: the user's.

    Attributes:
        best: The best plan that it has found; None before there is one.
    """

    def __init__(
        self, problem: PlanProblem, start: Schedule, seconds: float, folder: str | None
    ) -> None:
        package = Path(schedule_package.__file__).parent
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(package)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run, with which it ends
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended already; its status is logged later
            self._process.stdin.write(request(problem, start, seconds, folder).encode() + b"\n")
            self._process.stdin.flush()
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._unread = b""
        self.best: Schedule | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has ended; all that it has found has been read then."""
        if self._process.poll() is None:
            return False
        self.look()
        if self._process.returncode:
            log.warning(
                "the solver has failed with status %d; training goes on with the plan in use",
                self._process.returncode,
            )
        return True

    def look(self) -> None:
        """Read the plans that it has found, without waiting."""
        read = self._output.read()
        if read:
            *lines, self._unread = (self._unread + read).split(b"\n")
            if lines:
                self.best = from_numbers(json.loads(lines[-1]), "optpipe")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._output.close()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

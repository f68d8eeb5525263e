"""A process that searches for better plans during training, and the training's end of it.

It reads one request from standard input, writes a line for each plan that is better than all
before, and exits when it is done, when its input ends, or when its parent process has exited.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..costs import Costs
from ..plan_cache import PlanCache
from ..schedule import Schedule
from .optpipe import PlanImprover, SolvedPlanCache
from .plan_problem import PlanProblem

log = logging.getLogger(__name__)

_BOOT = """
import importlib, importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "alone", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]]
)
package = sys.modules["alone"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
importlib.import_module("alone.solver.plan_solver").main()
"""
"""The program of the process; its argument is the folder of the schedule package."""

_LOWEST_PRIORITY = 19
_SECONDS_BETWEEN_LOOKS = 1.0


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
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(Path(__file__).parents[1])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the run, with which it ends
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended already; its status is logged later
            self._process.stdin.write(_request(problem, start, seconds, folder).encode() + b"\n")
            self._process.stdin.flush()
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._unread = b""
        self.best: Schedule | None = None

    @property
    def has_exited(self) -> bool:
        """Whether it has ended; all that it has found has been read then."""
        if self._process.poll() is None:
            return False
        self.poll()
        if self._process.returncode:
            log.warning(
                "the solver has failed with status %d; training goes on with the plan in use",
                self._process.returncode,
            )
        return True

    def poll(self) -> None:
        """Read the plans that it has found, without waiting."""
        read = self._output.read()
        if read:
            *lines, self._unread = (self._unread + read).split(b"\n")
            if lines:
                self.best = Schedule.parse(json.loads(lines[-1]), "optpipe")

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._output.close()
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()


def _request(problem: PlanProblem, start: Schedule, seconds: float, folder: str | None) -> str:
    names = [field.name for field in fields(Costs) if field.name != "slices"]  # it has none
    costs = {name: getattr(problem.costs, name) for name in names}
    asked = {
        "num_microbatches": problem.num_microbatches,
        "placement": problem.placement,
        "costs": costs,
        "memory_limit": problem.memory_limit,
        "has_barrier": problem.has_barrier,
        "start": str(start),
        "seconds": seconds,
        "folder": folder,
    }
    return json.dumps(asked)


def _search_plans(asked: Mapping[str, Any], send: Callable[[Schedule], None]) -> None:
    """Search for plans; call ``send`` with every plan that is better than all before."""
    problem = PlanProblem(
        asked["num_microbatches"],
        tuple(asked["placement"]),
        Costs(**asked["costs"]),
        asked["memory_limit"],
        asked["has_barrier"],
    )
    solved_plans = SolvedPlanCache(PlanCache(asked["folder"]), problem)
    in_use, seconds = Schedule.parse(asked["start"], "optpipe"), asked["seconds"]
    start = solved_plans.start(in_use)
    if problem.seconds(start) < problem.seconds(in_use):
        send(start)
    if solved_plans.suffices(seconds):
        return
    began = time.monotonic()

    def keep(plan: Schedule) -> None:
        # The run may end before the solver.
        solved_plans.keep(improvement, time.monotonic() - began)
        send(plan)

    improvement = PlanImprover(problem, start, keep)
    if not improvement.is_final:
        improvement.improve(seconds)
        solved_plans.keep(improvement, seconds)


def main() -> None:
    """Answer one request, at the lowest priority."""
    if hasattr(os, "nice"):
        os.nice(_LOWEST_PRIORITY)
    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_exit_after_parent, args=(os.getppid(),), daemon=True).start()
    threading.Thread(target=_end_with_input, daemon=True).start()

    def send(plan: Schedule) -> None:
        sys.stdout.write(json.dumps(str(plan)) + "\n")
        sys.stdout.flush()

    _search_plans(asked, send)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def _exit_after_parent(parent: int) -> None:
    """Exit although another process has inherited the other end of the input and keeps it open."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(0)

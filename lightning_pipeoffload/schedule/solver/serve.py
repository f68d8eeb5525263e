"""A solver in a process of its own, which reads one request from standard input.

It writes a line for each plan that is better than all before, and exits when it is done, when its
input ends, or when its parent process has exited.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from ..costs import Costs
from ..plan_cache import PlanCache
from ..schedule import Schedule, from_numbers, to_numbers
from .optpipe import Improvement, SolvedPlans
from .plan_problem import PlanProblem

__all__ = ["BOOT", "answer", "main", "request"]

BOOT = """
import importlib, importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "alone", sys.argv[1] + "/__init__.py", submodule_search_locations=[sys.argv[1]]
)
package = sys.modules["alone"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
importlib.import_module("alone.solver.serve").main()
"""
"""The program of such a process; its argument is the folder of the schedule package."""

_LOWEST_PRIORITY = 19
_SECONDS_BETWEEN_LOOKS = 1.0


def request(problem: PlanProblem, start: Schedule, seconds: float, folder: str | None) -> str:
    """Return the line that asks for plans that are better than one, for some seconds.

    Args:
        problem: The problem.
        start: The plan that there is.
        seconds: The most that the solver takes.
        folder: The folder of plans that were found; None: the user's.
    """
    costs = {field.name: getattr(problem.costs, field.name) for field in fields(Costs)}
    asked = {
        "num_microbatches": problem.num_microbatches,
        "placement": problem.placement,
        "costs": costs,
        "memory_limit": problem.memory_limit,
        "has_barrier": problem.has_barrier,
        "start": to_numbers(start),
        "seconds": seconds,
        "folder": folder,
    }
    return json.dumps(asked)


def answer(asked: Mapping[str, Any], tell: Callable[[Schedule], None]) -> None:
    """Look for plans; ``tell`` is called with every plan that is better than all before."""
    problem = PlanProblem(
        asked["num_microbatches"],
        tuple(asked["placement"]),
        Costs(**asked["costs"]),
        asked["memory_limit"],
        asked["has_barrier"],
    )
    known = SolvedPlans(PlanCache(asked["folder"]), problem)
    in_use, seconds = from_numbers(asked["start"], "optpipe"), asked["seconds"]
    start = known.start(in_use)
    if problem.seconds(start) < problem.seconds(in_use):
        tell(start)
    if known.settles(seconds):
        return
    began = time.monotonic()

    def found(plan: Schedule) -> None:
        known.keep(improvement, time.monotonic() - began)  # the run may end before the solver
        tell(plan)

    improvement = Improvement(problem, start, found)
    if not improvement.is_final:
        improvement.go_on(seconds)
        known.keep(improvement, seconds)


def main() -> None:
    """Answer one request, at the lowest priority."""
    if hasattr(os, "nice"):
        os.nice(_LOWEST_PRIORITY)
    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    threading.Thread(target=_end_with_input, daemon=True).start()

    def tell(plan: Schedule) -> None:
        sys.stdout.write(json.dumps(to_numbers(plan)) + "\n")
        sys.stdout.flush()

    answer(asked, tell)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def _end_with_parent(parent: int) -> None:
    """Exit although another process has inherited the other end of the input and keeps it open."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(0)

"""Plans that change while training: losses stay, and the solver's process ends with the run."""

import os
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

import pytest

from lightning_pipeoffload.planning import plan_solver
from lightning_pipeoffload.planning.plan_solver import PlanSolver
from lightning_pipeoffload.schedule import Costs, accept
from lightning_pipeoffload.schedule.solver.optpipe import best_of_families
from lightning_pipeoffload.schedule.solver.plan_problem import PlanProblem
from tests.support.solved_fits import twice_and_never, with_solver

COSTS = Costs(30.0, 29.0, 20.0, 1.0, 17.0, 16.0, 20.0, 20.0, copy_lanes=2)
PROBLEM = PlanProblem(6, (0, 1, 2), COSTS, 34.0)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"accumulate": 2}),
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(1, {}, marks=pytest.mark.slow),
    ],
    ids=["accumulated", "three ranks", "one rank"],
)
def test_losses_are_the_same_to_the_bit_when_the_plan_changes_twice(ranks, size, options):
    changed, same = ranks(size).run(twice_and_never, size, 24, options)[0]
    plans = [plan for plan, _ in groupby(changed["plans"])]
    assert len(plans) >= 3  # what it measures by, the families' if that is another, and the two
    assert "OFFLOAD" in plans[-2]
    assert "OFFLOAD" not in plans[-1]
    assert changed["losses"] == same["losses"]


def test_the_solver_runs_beside_a_fit_and_ends_with_it(ranks, tmp_path):
    options = {"pause": 0.2}
    results = ranks(2).run(with_solver, 2, str(tmp_path), options)
    assert [len(result["ended"]) for result in results] == [1, 0]
    assert results[0]["ended"] == [-9] or results[0]["ended"] == [0]
    assert results[0]["report"]["schedule"] == "optpipe"


def test_it_ends_with_a_fit_that_fails(ranks, tmp_path):
    results = ranks(2).run(with_solver, 2, str(tmp_path), {"pause": 0.2, "end": "error"})
    assert "broken off" in results[0]["error"]
    assert None not in results[0]["ended"]


def until(condition, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.slow  # what is found within 30 s depends on the machine
def test_it_finds_plans_that_are_valid_and_better(tmp_path):
    start = best_of_families(PROBLEM)
    solver = PlanSolver(PROBLEM, start, 30.0, str(tmp_path))

    def has_found():
        solver.look()
        return solver.best is not None

    assert until(has_found)
    solver.close()
    accept(solver.best, COSTS, 34.0)
    assert PROBLEM.seconds(solver.best) < PROBLEM.seconds(start)
    assert list(tmp_path.iterdir())  # what it has found is kept, though it was ended
    again = PlanSolver(PROBLEM, start, 0.0, str(tmp_path))
    assert until(lambda: again.is_over)
    assert PROBLEM.seconds(again.best) < PROBLEM.seconds(start)
    again.close()


PARENT = """
import sys, time
from lightning_pipeoffload.planning.plan_solver import PlanSolver
from lightning_pipeoffload.schedule.solver.optpipe import best_of_families
from tests.loop.test_plan_updates import PROBLEM
solver = PlanSolver(PROBLEM, best_of_families(PROBLEM), 600.0, sys.argv[1])
print(solver._process.pid, flush=True)
time.sleep(600)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks for processes in /proc")
def test_it_has_the_lowest_priority_and_ends_when_the_process_that_started_it_is_killed(tmp_path):
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == 19)
    parent.kill()
    parent.wait()
    assert until(lambda: not is_running(pid))


def test_a_solver_that_fails_is_logged_and_does_no_harm(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(plan_solver, "BOOT", "raise SystemExit(3)")
    solver = PlanSolver(PROBLEM, best_of_families(PROBLEM), 30.0, str(tmp_path))
    assert until(lambda: solver.is_over)
    assert solver.best is None
    solver.close()
    assert "the solver has failed with status 3; training goes on" in caplog.text

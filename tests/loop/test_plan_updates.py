"""Plans that change while training: losses stay, and the solver's process ends with the run."""

import os
import signal
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from unittest import mock

import lightning as L
import pytest

from lightning_pipeoffload.loop import solver_search
from lightning_pipeoffload.planning import measurements
from lightning_pipeoffload.planning.limits import DeviceMemory
from lightning_pipeoffload.runtime.comm import ProcessGroupTransport
from lightning_pipeoffload.schedule import Costs, build, check_schedule, offload_activations
from lightning_pipeoffload.schedule.solver import (
    PlanProblem,
    PlanSolver,
    best_of_families,
    plan_solver,
)
from tests.support import auto_fits, fits
from tests.support.pairs import slow

_STARTED = []


class Scripted:
    """In the place of the solver: has another plan now and then, then it is over."""

    def __init__(self, problem, *arguments):
        self.best = None
        self.has_exited = False
        self.num_looks = 0
        costs = Costs(1.0, 1.0, 1.0, offload=0.1, reload=0.1)
        sizes = problem.num_ranks, problem.num_microbatches
        first, second = (build(name, *sizes) for name in ("gpipe", "1f1b"))
        self.plans = [offload_activations(first, costs, "full")[0], second]

    def poll(self):
        self.num_looks += 1
        if self.num_looks % 2 == 1:  # it is asked again when the plan in use has been measured
            self.has_exited = not self.plans
            self.best = self.plans.pop(0) if self.plans else self.best

    def close(self):
        pass


class Watched(plan_solver.PlanSolver):
    """The solver, whose process can be inspected after training."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.process = self._process
        _STARTED.append(self)


class Paced(L.Callback):
    """Gives the solver time, and notes by which plan each step ran."""

    def __init__(self, seconds, end):
        self.seconds, self.end = seconds, end
        self.plans = []

    def on_train_batch_end(self, trainer, *args):
        time.sleep(self.seconds)
        self.plans.append(str(trainer.strategy.plan))
        if len(self.plans) == 6 and self.end == "error":
            raise RuntimeError("broken off")
        if len(self.plans) == 6 and self.end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)


def fit(num_devices, max_steps, options):
    """Fit; return losses and the plans of the steps."""
    options = {"memory_limit": "400KiB", **options}
    paced = Paced(options.pop("pause", 0.0), options.pop("end", ""))
    accumulate = options.pop("accumulate", 1)
    L.seed_everything(7, workers=True, verbose=False)
    record = fits.Record()
    trainer = fits.trainer(
        num_devices,
        {"schedule": "optpipe", **options},
        max_steps=max_steps,
        limit_val_batches=1,
        accumulate_grad_batches=accumulate,
        callbacks=[record, paced],
    )
    trainer.fit(auto_fits.Wide(), fits.loader(), fits.loader())
    if trainer.global_rank:
        return {}
    return {"losses": record.losses, "plans": paced.plans, "report": trainer.strategy.report()}


def by_script(num_devices, max_steps, options):
    """Change the plan twice: to one that copies, and to another order."""
    with (
        mock.patch.object(solver_search, "PlanSolver", Scripted),
        mock.patch.object(solver_search, "is_worth_changing", return_value=True),
    ):
        return fit(num_devices, max_steps, {**options, "memory_limit": "4MiB"})


def twice_and_never(num_devices, max_steps, options):
    """Fit with changes of the plan, and without."""
    options = {"num_chunks": 1, **options}
    changed = by_script(num_devices, max_steps, options)
    return changed, fit(num_devices, max_steps, {**options, "solver_seconds": 0})


def with_solver(num_devices, folder, options):
    """Fit while a solver searches for plans; return the end of its process, too."""
    _STARTED.clear()
    options = {"plan_cache": folder, "solver_seconds": 60, **options}
    with mock.patch.object(solver_search, "PlanSolver", Watched):
        try:
            done = fit(num_devices, 8, options)
        except RuntimeError as error:
            done = {"error": str(error)}
    ended = [solver.process.poll() for solver in _STARTED]
    return {**done, "ended": ended}


COSTS = Costs(30.0, 29.0, 20.0, 1.0, 17.0, 16.0, 20.0, 20.0, copy_lanes=2)
PROBLEM = PlanProblem(6, (0, 1, 2), COSTS, 34.0)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        pytest.param(2, {"accumulate": 2}, marks=pytest.mark.slow),
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(1, {}, marks=pytest.mark.slow),
    ],
    ids=["accumulated", "three ranks", "one rank"],
)
def test_losses_are_the_same_to_the_bit_when_the_plan_changes_twice(ranks, size, options):
    changed, same = ranks(size).run(twice_and_never, size, 14, options)[0]
    plans = [plan for plan, _ in groupby(changed["plans"])]
    assert len(plans) >= 3  # what it measures by, the families' if that is another, and the two
    assert "OFFLOAD" in plans[-2]
    assert "OFFLOAD" not in plans[-1]
    assert changed["losses"] == same["losses"]


def test_the_solver_runs_during_a_fit_and_ends_with_it(ranks, tmp_path):
    options = {"pause": 0.05}
    results = ranks(2).run(with_solver, 2, str(tmp_path), options)
    assert [len(result["ended"]) for result in results] == [1, 0]
    assert results[0]["ended"] == [-9] or results[0]["ended"] == [0]


@pytest.mark.slow
def test_it_ends_with_a_fit_that_fails(ranks, tmp_path):
    results = ranks(2).run(with_solver, 2, str(tmp_path), {"pause": 0.05, "end": "error"})
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
        solver.poll()
        return solver.best is not None

    assert until(has_found)
    solver.close()
    check_schedule(solver.best, COSTS, 34.0)
    assert PROBLEM.seconds(solver.best) < PROBLEM.seconds(start)
    assert list(tmp_path.iterdir())  # what it has found is kept, though it was ended
    again = PlanSolver(PROBLEM, start, 0.0, str(tmp_path))
    assert until(lambda: again.has_exited)
    assert PROBLEM.seconds(again.best) < PROBLEM.seconds(start)
    again.close()


PARENT = """
import sys, time
from lightning_pipeoffload.schedule.solver.plan_solver import PlanSolver
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


@pytest.mark.slow
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
    monkeypatch.setattr(plan_solver, "_BOOT", "raise SystemExit(3)")
    solver = PlanSolver(PROBLEM, best_of_families(PROBLEM), 30.0, str(tmp_path))
    assert until(lambda: solver.has_exited)
    assert solver.best is None
    solver.close()
    assert "the solver has failed with status 3; training goes on" in caplog.text


def fit_on_a_card(num_devices, limit, uuid):
    """Fit as if messages were kernels, on a device with 8 MiB free that has a UUID."""
    free, taken = 8 << 20, []

    def take(device, missing):
        taken.append((trainer.global_step, missing))
        return 0

    known = ("node", uuid.format(os.environ["LOCAL_RANK"])) if uuid else ()
    own = DeviceMemory(known, free, 0)
    with (
        mock.patch.object(ProcessGroupTransport, "has_kernels", True),
        mock.patch.object(DeviceMemory, "of", return_value=own),
        mock.patch.object(measurements, "reserve_memory", take),
    ):
        pipeline = {"memory_limit": limit, "offload": "none" if limit is None else "auto"}
        trainer = fits.trainer(num_devices, pipeline, max_epochs=1, limit_val_batches=1)
        trainer.fit(fits.Net(), fits.loader(), fits.loader())
    return taken


@pytest.mark.parametrize(
    ("limit", "uuid", "most"),
    [
        (None, "GPU-a", 0.9 * (4 << 20)),
        slow((None, "GPU-{}", 0.9 * (8 << 20))),
        slow((None, "", 0.9 * (8 << 20))),
        ("1MiB", "GPU-a", 1 << 20),
    ],
)
def test_the_memory_of_plans_is_taken_once_after_the_first_step(ranks, limit, uuid, most):
    assert ranks(2).run(fit_on_a_card, 2, limit, uuid) == [[(1, int(most))]] * 2

"""Fits whose plan changes while they run, and what is left of the solver."""

from __future__ import annotations

import os
import signal
import time
from typing import Any
from unittest import mock

import lightning as L

from lightning_pipeoffload.loop import run_plans
from lightning_pipeoffload.planning import plan_solver
from lightning_pipeoffload.schedule import Costs, Schedule, build, offload_activations
from lightning_pipeoffload.schedule.solver.plan_problem import PlanProblem
from tests.support import auto_fits, fits

_STARTED: list[Watched] = []


class Scripted:
    """In the place of the solver: has another plan now and then, then it is over."""

    def __init__(self, problem: PlanProblem, *arguments: Any) -> None:
        self.best: Schedule | None = None
        self.is_over = False
        self.num_looks = 0
        costs = Costs(1.0, 1.0, 1.0, offload=0.1, reload=0.1)
        sizes = problem.num_ranks, problem.num_microbatches
        first, second = (build(name, *sizes) for name in ("gpipe", "1f1b"))
        self.plans = [offload_activations(first, costs, "full")[0], second]

    def look(self) -> None:
        self.num_looks += 1
        if self.num_looks % 6 == 1:  # by the next time all ranks have heard of it
            self.is_over = not self.plans
            self.best = self.plans.pop(0) if self.plans else self.best

    def close(self) -> None:
        pass


class Watched(plan_solver.PlanSolver):
    """The solver, whose process can be inspected after training."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.process = self._process
        _STARTED.append(self)


class Paced(L.Callback):
    """Gives the solver time, and notes by which plan each step ran."""

    def __init__(self, seconds: float, end: str) -> None:
        self.seconds, self.end = seconds, end
        self.plans: list[str] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        time.sleep(self.seconds)
        self.plans.append(str(trainer.strategy.plan))
        if len(self.plans) == 6 and self.end == "error":
            trainer.strategy.barrier()  # a rank that raises much later than another is ended
            raise RuntimeError("broken off")
        if len(self.plans) == 6 and self.end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)


def fit(num_devices: int, max_steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Fit; return losses and the plans of the steps."""
    options = {"memory_limit": "400KiB", **options}
    paced = Paced(options.pop("pause", 0.0), options.pop("end", ""))
    accumulate = options.pop("accumulate", 1)
    L.seed_everything(7, workers=True, verbose=False)
    record = fits.Record()
    trainer = L.Trainer(
        **fits.SILENT,
        devices=num_devices,
        strategy=fits.strategy(num_devices, schedule="optpipe", **options),
        max_steps=max_steps,
        limit_val_batches=1,
        accumulate_grad_batches=accumulate,
        enable_checkpointing=False,
        callbacks=[record, paced],
    )
    trainer.fit(auto_fits.Wide(), fits.loader(), fits.loader())
    if trainer.global_rank:
        return {}
    return {"losses": record.losses, "plans": paced.plans, "report": trainer.strategy.report()}


def by_script(num_devices: int, max_steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Change the plan twice: to one that copies, and to another order."""
    with (
        mock.patch.object(run_plans, "PlanSolver", Scripted),
        mock.patch.object(run_plans, "is_worth_changing", return_value=True),
    ):
        return fit(num_devices, max_steps, {**options, "memory_limit": "4MiB"})


def twice_and_never(
    num_devices: int, max_steps: int, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fit with changes of the plan, and without."""
    options = {"num_chunks": 1, **options}
    changed = by_script(num_devices, max_steps, options)
    return changed, fit(num_devices, max_steps, {**options, "solver_seconds": 0})


def with_solver(num_devices: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Fit while a solver searches for plans; return the end of its process, too."""
    _STARTED.clear()
    options = {"plan_cache": folder, "solver_seconds": 60, **options}
    with mock.patch.object(run_plans, "PlanSolver", Watched):
        try:
            done = fit(num_devices, 8, options)
        except RuntimeError as error:
            done = {"error": str(error)}
    ended = [solver.process.poll() for solver in _STARTED]
    return {**done, "ended": ended}

"""Fits whose steps come to take another time than their plan says, by a script."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch

from lightning_pipeoffload.loop import auto_choice, plan_updates
from lightning_pipeoffload.planning import measurements
from lightning_pipeoffload.runtime.timing import ActionTimer, TimedStep
from lightning_pipeoffload.schedule import Kind
from lightning_pipeoffload.schedule.candidates import Option
from tests.support import auto_fits, fits

Times = dict[Kind, float]

EVEN: Times = {Kind.F: 1e-2, Kind.B: 1e-2, Kind.W: 1e-2, Kind.BW: 2e-2}
LONGER: Times = {Kind.F: 1e-2, Kind.B: 3e-2, Kind.W: 3e-2, Kind.BW: 6e-2}


class Script:
    """What actions seem to take: one time until a step, another from then on.

    Args:
        before: Seconds of each kind.
        after: The same later.
        drifts_at: The number of steps before that.
        slow_rank: The only rank that drifts; None: all.
    """

    def __init__(
        self, before: Times, after: Times, drifts_at: int, slow_rank: int | None = None
    ) -> None:
        self.times, self.after = before, after
        self.drifts_at, self.slow_rank = drifts_at, slow_rank

    def seconds_in(
        self, timer: ActionTimer, steps: Iterable[TimedStep]
    ) -> dict[tuple[Kind, int], float]:
        """Stand for the timer's own method."""
        done = {(action.kind, action.stage) for step in steps for action, *_ in step.actions}
        return {(kind, stage): self.times[kind] for kind, stage in done}


class Follows(L.Callback):
    """Lets the script go on, and notes by which plan each step ran."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.plans: list[str] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.plans.append(str(trainer.strategy.plan))
        alone = self.script.slow_rank
        if len(self.plans) == self.script.drifts_at and alone in (None, trainer.global_rank):
            self.script.times = self.script.after


class Kept(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def fit(
    size: int,
    script: Script,
    max_steps: int,
    options: dict[str, Any],
    trainer: dict[str, Any],
    trained: tuple[L.LightningModule, Any] | None = None,
) -> dict[str, Any]:
    """Fit by a script; return losses, plans of the steps, warnings and the report.

    What is chosen automatically is 1F1B at first, which is slower than others of its cut.
    """
    L.seed_everything(7, workers=True, verbose=False)
    record, follows, kept = fits.Record(), Follows(script), Kept()
    run = L.Trainer(
        **fits.SILENT,
        devices=size,
        strategy=fits.strategy(size, **options),
        max_steps=max_steps,
        limit_val_batches=0,
        enable_checkpointing=False,
        callbacks=[record, follows],
        **trainer,
    )

    def seconds_in(timer: ActionTimer, steps: Iterable[TimedStep]) -> Any:
        return script.seconds_in(timer, steps)

    log = logging.getLogger("lightning_pipeoffload")
    log.addHandler(kept)
    try:
        with (
            mock.patch.object(ActionTimer, "seconds_in", seconds_in),
            mock.patch.object(measurements, "measure_hops", return_value={}),
            mock.patch.object(auto_choice, "options", return_value=[Option("1f1b", 1, 4)]),
        ):
            run.fit(*(trained or (auto_fits.Wide(), fits.loader())))
    finally:
        log.removeHandler(kept)
        torch.use_deterministic_algorithms(False)
    found = {"losses": record.losses, "plans": follows.plans, "said": kept.said}
    return {**found, "report": run.strategy.report()}


def drifting(
    size: int, options: dict[str, Any], max_steps: int, trainer: dict[str, Any]
) -> dict[str, Any]:
    """Fit with times that change after the first steps."""
    return fit(size, Script(EVEN, LONGER, drifts_at=6), max_steps, dict(options), trainer)


def drifting_and_not(
    size: int, options: dict[str, Any], max_steps: int, trainer: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fit so, and with times that stay."""
    stays = Script(EVEN, EVEN, drifts_at=6)
    changed = drifting(size, options, max_steps, trainer)
    return changed, fit(size, stays, max_steps, dict(options), trainer)


def slow_rank(size: int, rank: int, options: dict[str, Any], max_steps: int) -> dict[str, Any]:
    """Fit while one rank becomes three times as slow."""
    slow = {kind: 3 * seconds for kind, seconds in EVEN.items()}
    script = Script(EVEN, slow, drifts_at=26, slow_rank=rank)
    return fit(size, script, max_steps, dict(options), {})


def solved(size: int, max_steps: int) -> dict[str, Any]:
    """Fit by a solver that is over after some steps, with times that change while it looks."""
    ends_after, started = 10, []

    class Solver:
        best = None

        def __init__(self, *arguments: Any) -> None:
            self.num_looks = 0
            started.append(arguments)

        @property
        def is_over(self) -> bool:
            return self.num_looks >= ends_after

        def look(self) -> None:
            self.num_looks += 1

        def close(self) -> None:
            pass

    options = {"schedule": "optpipe", "memory_limit": "100MiB"}
    with mock.patch.object(plan_updates, "PlanSolver", Solver):
        script = Script(EVEN, LONGER, drifts_at=6)
        return {**fit(size, script, max_steps, options, {}), "started": len(started)}


class Sequences(fits.Net):
    """Takes sequences of tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["x"])
        self.log("train_loss", loss)
        return loss


def growing(numbers: list[int]) -> dict[str, Any]:
    """Make sequences of a batch: from the seventh on four times as long."""
    length = 256 if max(numbers) < 48 else 1024
    tokens = torch.tensor(numbers).unsqueeze(1).repeat(1, length) % 32
    return {"x": tokens, "names": [f"sample {number}" for number in numbers]}


def longer(size: int, limit: int, max_steps: int) -> dict[str, Any]:
    """Fit within a limit, with sequences and times that become longer."""
    options = {"schedule": "zb", "memory_limit": limit}
    numbers: Any = range(8 * max_steps)
    data = torch.utils.data.DataLoader(numbers, 8, collate_fn=growing)
    script = Script(EVEN, LONGER, drifts_at=6)
    return fit(size, script, max_steps, options, {}, (Sequences(), data))


class Held(fits.Net):
    """Global rank 0 ends each step when all other ranks have begun the next."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        if self.trainer.global_rank or batch_idx + 1 == self.trainer.max_steps:
            return
        others = [
            self.folder / f"{rank} {batch_idx + 1}" for rank in range(1, self.trainer.world_size)
        ]
        end = time.monotonic() + 60
        while not all(path.exists() for path in others):
            assert time.monotonic() < end, f"a rank waits for global rank 0 in step {batch_idx}"
            time.sleep(0.001)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        (self.folder / f"{self.trainer.global_rank} {batch_idx}").touch()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def held(size: int, folder: str, schedule: str) -> int:
    """Fit for as many steps as there are two votes in, global rank 0 always behind."""
    trainer = L.Trainer(
        **fits.SILENT,
        devices=size,
        strategy=fits.strategy(size, schedule=schedule),
        max_steps=11,
        enable_checkpointing=False,
    )
    data = torch.utils.data.DataLoader(fits.samples(88), 8, collate_fn=fits.collate)
    trainer.fit(Held(folder), data)
    return trainer.global_step

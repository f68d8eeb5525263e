"""Fits whose microbatches come to be larger than any that was planned for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest import mock

import lightning as L
import torch

from lightning_pipeoffload.planning import measurements
from lightning_pipeoffload.runtime.timing import ActionTimer, TimedStep
from lightning_pipeoffload.schedule import Kind
from tests.support import fits

SECONDS = {Kind.F: 1e-2, Kind.B: 1e-2, Kind.W: 1e-2, Kind.BW: 2e-2}


def seconds_in(timer: ActionTimer, steps: Iterable[TimedStep]) -> dict[tuple[Kind, int], float]:
    """Stand for the timer's own method, so that plans do not depend on the machine."""
    done = {(action.kind, action.stage) for step in steps for action, *_ in step.actions}
    return {(kind, stage): SECONDS[kind] for kind, stage in done}


class Plans(L.Callback):
    """Notes by which plan each step ran."""

    def __init__(self) -> None:
        self.plans: list[str] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.plans.append(str(trainer.strategy.plan))


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


def fit(size: int, lengths: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """Fit with sequences of so many tokens in each batch; return losses, plans and the report."""

    def make_batch(numbers: list[int]) -> dict[str, Any]:
        length = lengths[numbers[0] // 8]
        tokens = torch.tensor(numbers).unsqueeze(1).repeat(1, length) % 32
        return {"x": tokens, "names": [f"sample {number}" for number in numbers]}

    L.seed_everything(7, workers=True, verbose=False)
    record, plans = fits.Record(), Plans()
    trainer = L.Trainer(
        **fits.SILENT,
        devices=size,
        strategy=fits.strategy(size, **options),
        max_steps=len(lengths),
        limit_val_batches=0,
        enable_checkpointing=False,
        callbacks=[record, plans],
    )
    numbers: Any = range(8 * len(lengths))
    data = torch.utils.data.DataLoader(numbers, 8, collate_fn=make_batch)
    with (
        mock.patch.object(ActionTimer, "seconds_in", seconds_in),
        mock.patch.object(measurements, "measure_latencies", return_value={}),
    ):
        trainer.fit(Sequences(), data)
    return {"losses": record.losses, "plans": plans.plans, "report": trainer.strategy.report()}

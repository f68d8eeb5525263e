"""Where callbacks go by the clock, no rank waits for another at a batch's end."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipeoffload import PipeOffloadStrategy
from tests.support import fits
from tests.support.pairs import first

HELD = 1
HOUR = timedelta(hours=1)
PATIENCE_SECONDS = 60


class Held(fits.Net):
    """Global rank 0 ends a step when all other ranks have begun the next."""

    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        if self.trainer.global_rank == 0 and batch_idx == HELD:
            others = range(1, self.trainer.world_size)
            end = time.monotonic() + PATIENCE_SECONDS
            while not all((self.folder / str(rank)).exists() for rank in others):
                assert time.monotonic() < end, "a rank waits for global rank 0"
                time.sleep(0.01)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == HELD + 1:
            (self.folder / str(self.trainer.global_rank)).touch()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(schedule, clock, folder, size):
    callbacks = [ModelCheckpoint(folder, train_time_interval=HOUR)] if clock == "saves" else []
    trainer = L.Trainer(
        **fits.SILENT,
        devices=size,
        strategy=PipeOffloadStrategy(num_microbatches=2 * size, schedule=schedule),
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        max_time=HOUR if clock == "ends" else None,
        max_steps=HELD + 2,
    )
    trainer.fit(Held(folder), fits.loader(batch_size=12))


@pytest.mark.parametrize(
    ("schedule", "clock", "size"),
    first(
        3,
        [
            *(("1f1b", "saves", 3), ("zb_v", "ends", 2), ("zb_2p", "", 3)),
            *(("zb_h1", "saves", 2), ("interleaved_1f1b", "ends", 2), ("uniform", "", 2)),
        ],
    ),
)
def test_the_others_begin_a_step_that_global_rank_0_has_yet_to_end(
    ranks, tmp_path, schedule, clock, size
):
    ranks(size).run(fit, schedule, clock, str(tmp_path), size)


class Clock:
    """Goes as far on each rank as it is told, batch by batch."""

    def __init__(self, seconds):
        self.seconds, self.now = seconds, 0.0

    def monotonic(self):
        return self.now


class Ticks(L.Callback):
    def __init__(self, clock):
        self.clock = clock
        self.saved = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.clock.now += self.clock.seconds[trainer.global_rank]

    def on_save_checkpoint(self, trainer, module, checkpoint):
        self.saved.append(trainer.global_step)


def save_by_time(folder, interval):
    from lightning.pytorch.callbacks import model_checkpoint

    clock = Clock([10.0, 1.0])
    plain, model_checkpoint.time = model_checkpoint.time, clock
    ticks = Ticks(clock)
    try:
        trainer = L.Trainer(
            **fits.SILENT,
            devices=2,
            strategy=PipeOffloadStrategy(num_microbatches=4),
            callbacks=[ticks, ModelCheckpoint(folder, train_time_interval=interval)],
            max_steps=10,
        )
        trainer.fit(fits.Net(), fits.loader())
    finally:
        model_checkpoint.time = plain
    return ticks.saved


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(30, [4, 8]), (0, [*range(1, 11)])],
    ids=["a step later than global rank 0's clock", "after each"],
)
def test_all_save_after_the_same_batch(ranks, tmp_path, seconds, steps):
    saved = ranks(2).run(save_by_time, str(tmp_path), timedelta(seconds=seconds))
    assert saved[0][: len(steps)] == steps
    assert saved[1] == saved[0]


def end_by_time(seconds):
    trainer = L.Trainer(
        **fits.SILENT,
        devices=2,
        strategy=PipeOffloadStrategy(num_microbatches=4),
        callbacks=[RunsOut(seconds)],
        max_time=HOUR,
        max_steps=10,
        enable_checkpointing=False,
    )
    trainer.fit(fits.Net(), fits.loader())
    return trainer.global_step


class RunsOut(L.Callback):
    """Lets the time be over on one rank after two batches."""

    def __init__(self, rank):
        self.rank = rank

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        timer = next(c for c in trainer.callbacks if isinstance(c, L.pytorch.callbacks.Timer))
        if batch_idx == 2 and trainer.global_rank == self.rank:
            timer._duration = 0.0


@pytest.mark.parametrize("rank", [0, 1])
def test_time_that_is_over_on_one_rank_ends_all(ranks, rank):
    found = ranks(2).run(end_by_time, rank)
    assert found[0] == found[1]
    assert found[0] in (3, 4)

"""What one rank decides for all: to stop, and by its clock to save, to validate and to end."""

from datetime import timedelta

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, Timer, model_checkpoint

from tests.support import fits
from tests.support.pairs import first, slow, some


class Stopping(fits.Net):
    """Sets ``should_stop`` in the batch of index 2, or at an end.

    Args:
        where: a hook, or "step": after the blocks.
        ranks: that do; None: all.
    """

    def __init__(self, where, ranks):
        super().__init__(dropout=0.0)
        self.where, self.ranks = where, ranks

    def stop(self, where):
        is_here = self.ranks is None or self.trainer.global_rank in self.ranks
        if where == self.where and is_here and not self.trainer.sanity_checking:
            self.trainer.should_stop = True

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and loss.item() > 0:
            self.stop("step")
        return loss

    def on_fit_start(self):
        self.stop("on_fit_start")

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.stop("on_train_epoch_start")

    def on_validation_end(self):
        self.stop("on_validation_end")

    def on_train_epoch_end(self):
        self.stop("on_train_epoch_end")


class StopAtBatch(L.Callback):
    """The same in hooks around a batch, which only some fits are to have."""

    def on_train_batch_start(self, trainer, module, *_):
        if trainer.fit_loop.epoch_loop.batch_idx == 2:
            module.stop("on_train_batch_start")

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.fit_loop.epoch_loop.batch_idx == 2:
            module.stop("on_train_batch_end")


def stop(num_devices, where, ranks, schedule="zb_h1", **options):
    """Return after how many steps and batches a fit of three epochs has stopped, and its loss."""
    L.seed_everything(7, verbose=False)
    trainer = fits.trainer(
        num_devices,
        {"schedule": schedule},
        max_epochs=3,
        callbacks=[StopAtBatch()] if "batch" in where else [],
        **options,
    )
    trainer.fit(Stopping(where, ranks), fits.loader(), fits.loader())
    batches = trainer.fit_loop.epoch_loop.batch_progress.total.completed
    return trainer.global_step, batches, float(trainer.callback_metrics.get("train_loss_step", 0))


EXACT = ["on_fit_start", "on_train_epoch_start", "on_validation_end", "on_train_epoch_end"]


@pytest.mark.parametrize(
    ("size", "where", "ranks_that_stop", "schedule"),
    some(
        [
            (3, "step", None, "zb_v"),
            (2, "step", None, "auto"),
            (2, "on_train_batch_start", None, "zb_h1"),
            (3, "on_train_batch_end", None, "auto"),
            *((2, where, [index % 2], "zb_h1") for index, where in enumerate(EXACT)),
        ],
        2,
    ),
)
def test_all_stop_where_one_device_does(ranks, size, where, ranks_that_stop, schedule):
    done = ranks(size).run(stop, size, where, ranks_that_stop, schedule)
    plain = stop(0, where, None)
    for found in done:
        assert found[:2] == plain[:2]
        assert found[2] == pytest.approx(plain[2], rel=1e-9)


@pytest.mark.parametrize(("size", "rank"), first(2, [(2, 0), (3, 1), (2, 1), (3, 2)]))
def test_what_one_rank_sets_in_a_hook_of_a_batch_stops_all_after_the_next(ranks, size, rank):
    done = ranks(size).run(stop, size, "on_train_batch_end", [rank])
    assert {found[:2] for found in done} == {(4, 4)}


def test_where_batches_accumulate_all_stop_after_the_batch_as_on_one_device(ranks):
    done = ranks(2).run(stop_accumulating)
    assert {found[:2] for found in done} == {(0, 3)}


def stop_accumulating():
    return stop(2, "step", None, accumulate_grad_batches=4)


class Clock:
    """Advances by other seconds on each rank, batch by batch."""

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


class Elapsed(L.Callback):
    """Makes time run out on one rank in its third batch; notes the steps of validations."""

    def __init__(self, rank, kind):
        self.rank, self.kind = rank, kind
        self.validated = []

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_rank == self.rank and trainer.global_step == 2:
            if self.kind == "validates":
                trainer._last_val_time = float("-inf")
            else:
                timer = next(c for c in trainer.callbacks if isinstance(c, Timer))
                timer._duration = 0.0

    def on_validation_start(self, trainer, module):
        self.validated.append(trainer.global_step)


def fit(*callbacks, **options):
    trainer = fits.trainer(
        2,
        {"num_microbatches": 4, "schedule": "zb_h1"},
        num_sanity_val_steps=0,
        **options,
        callbacks=[*callbacks],
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
    )
    trainer.fit(fits.Net(depth=4), fits.loader(), fits.loader())
    return trainer.global_step


def save_by_time(folder, interval):
    clock = Clock([10.0, 1.0])
    plain, model_checkpoint.time = model_checkpoint.time, clock
    ticks = Ticks(clock)
    try:
        fit(ticks, ModelCheckpoint(folder, train_time_interval=interval), max_steps=10)
    finally:
        model_checkpoint.time = plain
    return ticks.saved


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(30, [4, 8]), slow((0, [*range(1, 11)]))],
    ids=["a step later than global rank 0's clock", "after each"],
)
def test_all_save_after_the_same_batch(ranks, tmp_path, seconds, steps):
    saved = ranks(2).run(save_by_time, str(tmp_path), timedelta(seconds=seconds))
    assert saved[0][: len(steps)] == steps
    assert saved[1] == saved[0]


def validate_by_time(rank, days):
    elapsed = Elapsed(rank, "validates")
    fit(elapsed, max_epochs=1, val_check_interval=timedelta(days))
    return elapsed.validated


@pytest.mark.parametrize(
    ("rank", "days", "steps"), [(0, 1, [3]), (0, 0, [1, 2, 3, 4, 5]), slow((1, 1, []))]
)
def test_all_validate_a_batch_later_than_global_rank_0s_clock(ranks, rank, days, steps):
    assert ranks(2).run(validate_by_time, rank, days) == [steps, steps]


def end_by_time(rank):
    elapsed = Elapsed(rank, "ends")
    return fit(elapsed, max_time=timedelta(hours=1), max_steps=10, limit_val_batches=0)


@pytest.mark.parametrize("rank", some([1, 0], 2))
def test_time_that_is_over_on_one_rank_ends_all(ranks, rank):
    found = ranks(2).run(end_by_time, rank)
    assert found[0] == found[1]
    assert found[0] in (3, 4)

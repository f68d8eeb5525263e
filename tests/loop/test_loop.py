"""Lightning's habits over a pipeline, against one device on the same loop."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from itertools import cycle
from tempfile import TemporaryDirectory

import lightning as L
import pytest
import torch

from tests.support import fits, habits
from tests.support.pairs import some


@cache
def on_one_device(row):
    with TemporaryDirectory() as folder:
        return habits.run(row, 0, "", folder)


@pytest.mark.parametrize(
    ("row", "schedule"), some(zip(habits.ROWS, cycle(["1f1b", "zb_h1", "zb_v"])), 3)
)
def test_a_habit_is_as_on_one_device(ranks, tmp_path, row, schedule):
    expected = on_one_device(row)
    count = habits.ROWS[row].num_devices
    for outcome in ranks(count).run(habits.run, row, count, schedule, str(tmp_path)):
        numbers = {name: expected["numbers"][name] for name in outcome["numbers"]}
        torch.testing.assert_close(outcome["numbers"], numbers, rtol=1e-10, atol=1e-12)
        for what in ("hooks", "files", "progress"):
            assert outcome[what] == expected[what]


class Validated(L.Callback):
    """Makes one rank's last validation long ago; notes the steps at which there is one."""

    def __init__(self, rank):
        self.rank, self.steps = rank, []

    def on_train_batch_end(self, trainer, module, *args):
        if trainer.global_rank == self.rank and trainer.global_step == 2:
            trainer._last_val_time = float("-inf")

    def on_validation_start(self, trainer, module):
        self.steps.append(trainer.global_step)


def _validate_by_clock(rank):
    clock = Validated(rank)
    trainer = L.Trainer(
        **fits.SILENT | {"num_sanity_val_steps": 0},
        devices=2,
        strategy=fits.strategy(2),
        max_epochs=1,
        val_check_interval=timedelta(days=1),
        enable_checkpointing=False,
        callbacks=[clock],
    )
    trainer.fit(fits.Net(depth=4), fits.loader(), fits.loader())
    return clock.steps


@pytest.mark.parametrize(("rank", "steps"), [(0, [3]), (1, [])])
def test_ranks_validate_by_global_rank_0s_clock_a_batch_later(ranks, rank, steps):
    assert ranks(2).run(_validate_by_clock, rank) == [steps, steps]

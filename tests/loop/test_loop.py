"""Lightning's habits, tuner and pruning over a pipeline, against one device."""

from __future__ import annotations

from functools import cache
from itertools import cycle
from tempfile import TemporaryDirectory

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from tests.support import fits, habits
from tests.support.pairs import first, slow, some


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


class Tuned(fits.Net):
    """Brings its own loader, of a size that a tuner may set."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.batch_size, self.lr = 4, 0.1

    def train_dataloader(self):
        return DataLoader(fits.samples(), self.batch_size, collate_fn=fits.collate)

    val_dataloader = test_dataloader = train_dataloader

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def make_trainer(num_devices, **options):
    trainer = fits.trainer(
        num_devices,
        {"num_microbatches": "auto"},
        num_sanity_val_steps=0,
        **options,
        max_epochs=1,
        enable_checkpointing=True,
    )
    if num_devices:
        fits.outlive_failures(trainer)
    return trainer


def scale(num_devices, folder, method):
    module, trainer = Tuned(), make_trainer(num_devices, default_root_dir=folder)
    try:
        found = Tuner(trainer).scale_batch_size(
            module, method=method, max_trials=3, steps_per_trial=2
        )
    except ValueError as error:
        return str(error)
    getattr(trainer, method)(module)
    return found, module.batch_size


@pytest.mark.parametrize("method", first(1, ["fit", "validate", "test"]))
def test_one_rank_finds_the_batch_size_of_one_device(ranks, tmp_path, method):
    expected = scale(0, tmp_path, method)
    assert ranks(1).run(scale, 1, str(tmp_path), method) == [expected]


@pytest.mark.parametrize("method", some(["fit", "validate"], 2))
def test_several_ranks_refuse_to_search_for_a_batch_size(ranks, tmp_path, method):
    for refusal in ranks(2).run(scale, 2, str(tmp_path), method):
        assert "the batch size finder is not supported over several ranks" in refusal
        assert "use memory_limit, or devices=1" in refusal


def find_rate(num_devices, folder):
    L.seed_everything(7, verbose=False)
    module, trainer = Tuned(), make_trainer(num_devices, default_root_dir=folder)
    finder = Tuner(trainer).lr_find(module, num_training=10, early_stop_threshold=None)
    tried = finder.results["lr"], finder.results["loss"]
    trainer.fit(module)
    return *tried, module.lr, float(trainer.callback_metrics["train_loss"])


@pytest.mark.parametrize("num_ranks", [slow(1), 2])
def test_a_learning_rate_is_found_as_on_one_device(ranks, tmp_path, num_ranks):
    expected = find_rate(0, tmp_path)
    for found in ranks(num_ranks).run(find_rate, num_ranks, str(tmp_path)):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9)


def find_rate_again(num_devices, folder):
    module, trainer = Tuned(), make_trainer(num_devices, default_root_dir=folder)
    loader = DataLoader(fits.samples(), 4, shuffle=True, collate_fn=fits.collate)
    finders = [Tuner(trainer).lr_find(module, loader, num_training=10) for _ in range(2)]
    return [finder.results["loss"] for finder in finders]


def test_a_second_search_for_a_learning_rate_has_the_same_random_numbers(ranks, tmp_path):
    for once, again in ranks(2).run(find_rate_again, 2, str(tmp_path)):
        assert once == again


def prune(num_devices):
    trainer = make_trainer(num_devices, callbacks=[ModelPruning("l1_unstructured", amount=0.3)])
    with pytest.raises(ValueError, match="ModelPruning") as refusal:
        trainer.fit(Tuned())
    return str(refusal.value)


@pytest.mark.parametrize("num_ranks", [2, slow(1)])
def test_pruning_while_training_is_refused(ranks, num_ranks):
    for refusal in ranks(num_ranks).run(prune, num_ranks):
        assert "prune the checkpoint after training instead" in refusal

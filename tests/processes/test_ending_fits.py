"""Checkpoints when a rank is killed within a save, or cannot write."""

import random
from pathlib import Path

import pytest
import torch

from lightning_pipeoffload.checkpoints import path_or_backup
from tests.support.ending_fits import FillDisk, Impatient, SaveAndDie, run
from tests.support.pairs import some
from tests.support.saving_fits import consolidate

NEVER = -1
VICTIMS = [(True, False), (False, True), (True, True)]


def load(path):
    path = Path(path_or_backup(path))
    return torch.load(consolidate(path) if path.is_dir() else path, weights_only=True)


def is_same(one, other):
    return one["global_step"] == other["global_step"] and all(
        torch.equal(value, other["state_dict"][name]) for name, value in one["state_dict"].items()
    )


@pytest.mark.parametrize("form", some(["folder", "file"], 2))
def test_the_checkpoint_is_whole_after_a_kill_at_any_call(tmp_path, form):
    log, whole = str(tmp_path / "log"), str(tmp_path / "whole.ckpt")
    ended, logs = run(log, form == "folder", [[SaveAndDie(whole, None)]] * 2)
    assert ended == [0, 0], logs
    calls = [int(Path(f"{whole}.calls{rank}").read_text()) for rank in range(2)]
    before, after = load(f"{whole}.first"), load(whole)
    draw = random.Random(0)
    for point, victims in enumerate(VICTIMS):
        path = str(tmp_path / f"{point}.ckpt")
        last = [
            draw.randrange(count) if dies else NEVER
            for count, dies in zip(calls, victims, strict=True)
        ]
        ended, _ = run(
            log, form == "folder", tuple([Impatient(), SaveAndDie(path, call)] for call in last)
        )
        assert -9 in ended
        assert 0 not in ended
        found = load(path)
        assert is_same(found, before) or is_same(found, after)


@pytest.mark.parametrize(("form", "rank"), [("file", 0), ("folder", 0), ("folder", 1)])
def test_a_full_disk_stops_all_ranks_and_the_checkpoint_stays(tmp_path, form, rank):
    path = str(tmp_path / "last.ckpt")
    callbacks = [FillDisk(rank, 28_000, form == "folder"), SaveAndDie(path, NEVER)]
    ended, logs = run(str(tmp_path / "log"), form == "folder", [callbacks] * 2)
    assert 0 not in ended
    assert "was not saved" in logs[rank]
    assert "File too large" in logs[rank]
    # A folder is every rank's: all raise the same.
    assert ("stops because of global rank" in "".join(logs)) == (form == "file")
    assert load(path)["global_step"] == 1
    assert not list(tmp_path.glob("*.part"))

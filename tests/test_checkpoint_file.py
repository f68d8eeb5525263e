"""A checkpoint is replaced in one step: a kill at any moment leaves the old or the new one."""

from __future__ import annotations

import random
import time
from itertools import count
from multiprocessing import get_context

import pytest
import torch

from lightning_pipeoffload import checkpoint_file
from lightning_pipeoffload.checkpoint_file import MovingCheckpointIO, move_into_place, part_of

# A fork: importing torch anew would take longer than all that is killed.
FORK = get_context("fork")


def save_for_ever(path, form, saved):
    for step in count():
        state = {"step": step, "weight": torch.full((10_000,), float(step))}
        if form == "file":
            MovingCheckpointIO().save_checkpoint(state, path)
        else:
            part = part_of(path)
            part.mkdir()
            for name in "ab":
                torch.save(state, part / name)
            move_into_place(part, path)
        saved.set()


def make(path, form, content):
    if form == "folder":
        path.mkdir()
        path = path / f"shard {content}"
    path.write_text(content)


def read(path):
    files = [path] if path.is_file() else list(path.iterdir())
    return [file.read_text() for file in files]


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("old", ["nothing", "file", "folder"])
@pytest.mark.parametrize("new", ["file", "folder"])
def test_what_was_there_is_replaced_whole(tmp_path, monkeypatch, old, new, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(checkpoint_file, "_exchange", lambda one, other: False)
    path = tmp_path / "last.ckpt"
    if old != "nothing":
        make(path, old, "old")
    part = part_of(path)
    make(part, new, "new")
    move_into_place(part, path)
    assert read(path) == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_replaced_and_its_target_kept(tmp_path):
    make(tmp_path / "epoch=1.ckpt", "folder", "old")
    link = tmp_path / "last.ckpt"
    link.symlink_to("epoch=1.ckpt")
    make(part_of(link), "folder", "new")
    move_into_place(tmp_path / "last.ckpt.part", link)
    assert (read(link), read(tmp_path / "epoch=1.ckpt")) == (["new"], ["old"])


def test_what_a_killed_run_left_is_deleted(tmp_path):
    make(tmp_path / "last.ckpt.part", "folder", "half")
    MovingCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt") == {"step": 1}


@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path, form):
    path = tmp_path / "last.ckpt"
    draw = random.Random(0)
    for _ in range(10):
        saved = FORK.Event()
        process = FORK.Process(target=save_for_ever, args=(path, form, saved))
        process.start()
        assert saved.wait(30)
        time.sleep(draw.random() / 100)
        process.kill()
        process.join()
        states = [torch.load(file) for file in ([path] if form == "file" else path.iterdir())]
        assert len(states) == (1 if form == "file" else 2)
        assert all((state["weight"] == state["step"]).all() for state in states)

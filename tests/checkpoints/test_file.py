"""A checkpoint is replaced when it is complete: a kill at any moment leaves the old or the new."""

import os
import resource
import signal
import sys
from itertools import count
from multiprocessing import get_context

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import save as torch_save

from lightning_pipeoffload import PipeOffloadStrategy
from lightning_pipeoffload.checkpoints import PartWriter, path_or_backup
from lightning_pipeoffload.checkpoints import file as checkpoint_file
from lightning_pipeoffload.checkpoints.file import AtomicCheckpointIO, replace_atomically

# A fork: importing torch anew would take longer than all that is killed.
FORK = get_context("fork")


def save(path, form, content):
    with replace_atomically(path, folder=form == "folder") as part:
        for name in "ab" if form == "folder" else [""]:
            (part / name).write_text(content)


def make(path, form, content):
    if form == "folder":
        path.mkdir()
        path = path / f"shard {content}"
    path.write_text(content)


def read(path):
    return [file.read_text() for file in ([path] if path.is_file() else path.iterdir())]


def save_until(path, form, content, last):
    """Save, and be killed at the event of that number: a file opened, moved, deleted..."""
    events = count()

    def watch(event, args):
        if next(events) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    save(path, form, content)
    os._exit(0)


@pytest.mark.parametrize("old", ["nothing", "file", "folder"])
@pytest.mark.parametrize("new", ["file", "folder"])
def test_what_was_there_is_replaced_whole(tmp_path, old, new):
    path = tmp_path / "last.ckpt"
    if old != "nothing":
        make(path, old, "old")
    save(path, new, "new")
    assert set(read(path)) == {"new"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_replaced_and_its_target_kept(tmp_path):
    make(tmp_path / "epoch=1.ckpt", "folder", "old")
    link = tmp_path / "last.ckpt"
    link.symlink_to("epoch=1.ckpt")
    save(link, "folder", "new")
    assert (read(link), read(tmp_path / "epoch=1.ckpt")) == (["new", "new"], ["old"])


@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_kill_at_any_event_leaves_a_whole_checkpoint_and_the_next_save_cleans_up(tmp_path, form):
    path = tmp_path / "last.ckpt"
    save(path, form, "0")
    before = {"0"}
    for event in count():
        process = FORK.Process(target=save_until, args=(path, form, str(event + 1), event))
        process.start()
        process.join()
        found = set(read(path_or_backup(path)))
        assert len(found) == 1
        assert found <= before | {str(event + 1)}
        before = found
        if process.exitcode == 0:
            break
    assert event > 8
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["download.part", "data.0123abcd.part", "being-written.part"])
def test_a_file_of_the_users_stays(tmp_path, name):
    make(tmp_path / name, "file", "half")
    save(tmp_path / "last.ckpt", "file", "new")
    assert read(tmp_path / name) == ["half"]


def test_what_another_run_is_writing_stays(tmp_path):
    with replace_atomically(tmp_path / "other.ckpt") as part:
        save(tmp_path / "last.ckpt", "file", "new")
        part.write_text("other")
    assert read(tmp_path / "other.ckpt") == ["other"]


def test_what_another_run_takes_for_a_killed_one_s_is_begun_again(tmp_path, monkeypatch):
    plain, num_begun = checkpoint_file._try_lock, count()

    def lock(part, waits=False):
        if waits and not next(num_begun):
            checkpoint_file.delete_leftovers(tmp_path)  # of a run that saves at that moment
        return plain(part, waits)

    monkeypatch.setattr(checkpoint_file, "_try_lock", lock)
    save(tmp_path / "last.ckpt", "folder", "new")
    assert read(tmp_path / "last.ckpt") == ["new", "new"]
    assert next(num_begun) == 2


@pytest.mark.parametrize(("days", "stays"), [(0, True), (2, False)])
@pytest.mark.parametrize("form", ["file", "folder"])
def test_what_another_node_has_begun_goes_a_day_after_its_last_write(tmp_path, form, days, stays):
    part = tmp_path / "being-written.0123abcd.89abcdef.part"  # its lock is free here
    make(part, form, "half")
    for path in (part, *part.rglob("*")):
        then = path.stat().st_mtime - days * 24 * 3600
        os.utime(path, (then, then))
    save(tmp_path / "last.ckpt", "file", "new")
    assert part.exists() == stays


def save_with_limits(path, form):
    """Save under limits of a file's size, each of which is to be raised as the system says it."""
    values = {f"layer {n}": torch.ones(10_000) for n in range(3)}
    for size in range(0, 120_000, 3_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        if form == "file":
            with pytest.raises(OSError, match="File too large"):
                AtomicCheckpointIO().save_checkpoint(values, path)
        else:
            path.mkdir(exist_ok=True)
            with pytest.raises(CheckpointException) as raised:
                torch_save(values, storage_writer=PartWriter(path), no_dist=True)
            ((cause, _),) = raised.value.failures.values()
            assert isinstance(cause, OSError), cause


@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_limit_of_a_files_size_is_named_wherever_it_is_met(tmp_path, form):
    path = tmp_path / "last.ckpt"
    make(path, "file", "old") if form == "file" else None
    process = FORK.Process(target=save_with_limits, args=(path, form))
    process.start()
    process.join()
    assert process.exitcode == 0
    if form == "file":
        assert (read(path), [*tmp_path.iterdir()]) == (["old"], [path])


def test_a_part_is_not_written_to_a_disk_that_global_rank_0_does_not_share(tmp_path):
    with pytest.raises(CheckpointException, match="is not on this machine; save to a file system"):
        torch_save({"x": torch.ones(2)}, storage_writer=PartWriter(tmp_path / "part"), no_dist=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_removed_checkpoint_is_gone(tmp_path, form):
    path = tmp_path / "last.ckpt"
    save(path, form, "old")
    AtomicCheckpointIO().remove_checkpoint(path)
    AtomicCheckpointIO().remove_checkpoint(path)
    assert list(tmp_path.iterdir()) == []


def test_an_asynchronous_checkpoint_is_moved_too(tmp_path):
    strategy = PipeOffloadStrategy()
    strategy.checkpoint_io = AsyncCheckpointIO()
    strategy.checkpoint_io.save_checkpoint({"step": 1}, tmp_path / "last.ckpt")
    strategy.checkpoint_io.teardown()
    assert torch.load(tmp_path / "last.ckpt") == {"step": 1}
    assert isinstance(strategy.checkpoint_io.checkpoint_io, AtomicCheckpointIO)


def test_a_writer_of_files_is_refused_where_folders_are_written():
    strategy = PipeOffloadStrategy(save_distributed_checkpoint=True)
    with pytest.raises(ValueError, match="AsyncCheckpointIO writes files"):
        strategy.checkpoint_io = AsyncCheckpointIO()

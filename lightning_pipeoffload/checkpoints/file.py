"""Checkpoints that a kill cannot spoil: written to a new place, then moved to where they belong.

At any moment the old checkpoint or the new one is whole, under the checkpoint's name::

    being-written.1a2b3c4d.part   new: written, flushed        old: deleted
    last.ckpt                     old             <- exchange ->      new
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import (
    _WrappingCheckpointIO,  # private: what AsyncCheckpointIO is
)
from typing_extensions import override

from lightning_pipeoffload.checkpoints.stored_file import is_archive, load_later, on_host

_BEING_WRITTEN = "being-written"  # a name that nobody else gives
_PART = ".part"
_TOKEN_LENGTH = 8
_AT_CURRENT_FOLDER = -100  # AT_FDCWD of fcntl.h
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h


class MovingCheckpointIO(TorchCheckpointIO):
    """Writes a local file next to its place and moves it there; others as Lightning does.

    Lightning's own writes to the system's temporary folder. From another disk a move is a copy,
    which a kill leaves half done, over the checkpoint before it.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        if is_remote(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with replacing(path) as part, part.open("wb") as file, showing_first_error():
            torch.save(checkpoint, file)  # given a name it hides why it could not write

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = present(path)
        if map_location is None and not is_remote(path) and is_archive(path):
            return load_later(path, weights_only, _is_of_one_rank)
        return super().load_checkpoint(path, map_location or on_host, weights_only)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        if is_remote(path):
            super().remove_checkpoint(path)
            return
        if os.path.lexists(path):
            part = _new_part(Path(path))
            os.rename(path, part)  # a folder goes file by file, and half of one is no checkpoint
            delete(part)


def _is_of_one_rank(place: tuple[Any, ...]) -> bool:
    """Whether a checkpoint's entry is one of those that are shared out among the ranks."""
    return place[0] == "state_dict" or (place[0] == "optimizer_states" and place[2] == "state")


def let_move(io: CheckpointIO) -> None:
    """Let a plugin around another one write by :class:`MovingCheckpointIO`, if it has none yet."""
    if isinstance(io, _WrappingCheckpointIO):
        io.checkpoint_io = MovingCheckpointIO()


@contextmanager
def replacing(path: str | Path, folder: bool = False) -> Iterator[Path]:
    """Give a new file or folder to write to, which is moved to ``path`` when the block ends.

    If the block raises, what it wrote is deleted, and ``path`` stays as it was. What killed runs
    have left in the same folder is deleted first: it may be what fills the disk.

    Raises:
        OSError: There is no room, say; the message names the checkpoint.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    delete_leftovers(path.parent)
    part = _new_part(path)
    part.mkdir() if folder else part.touch()
    lock = _lock(part)
    try:
        yield part
        _move_into_place(part, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"the checkpoint was not saved: {reason}", str(path)) from error
    finally:
        delete(part)
        if lock is not None:
            os.close(lock)


@contextmanager
def showing_first_error() -> Iterator[None]:
    """Raise what broke a write of torch's, not what torch raises as it closes the file after it."""
    try:
        yield
    except RuntimeError as error:
        if error.__context__ is None or "unexpected pos" not in str(error):
            raise
        raise error.__context__ from None


def _move_into_place(part: Path, path: Path) -> None:
    """Move a file or a folder to ``path``; at any moment the old or the new one is there, whole.

    Where the file system cannot exchange two names (NFS), a folder that is there makes room under
    the name that :func:`present` knows.
    """
    _flush(part)
    if not os.path.lexists(path) or not (part.is_dir() or path.is_dir()):
        part.replace(path)
        delete(_aside(path))
        return
    if _exchange(part, path):
        return  # what was at the path is now the part, which its maker deletes
    aside = _aside(path)
    delete(aside)
    path.rename(aside)
    part.rename(path)
    delete(aside)


def present(path: str | Path) -> str | Path:
    """Return where a checkpoint is: at ``path``, or where a kill within a move has left it."""
    if is_remote(path) or os.path.lexists(path):
        return path
    aside = _aside(Path(path))
    return aside if aside.exists() else path


def delete(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):  # another run deletes it too
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def delete_leftovers(folder: Path) -> None:
    """Delete what killed runs were writing in a folder; what someone is writing stays."""
    for part in folder.glob(f"{_BEING_WRITTEN}.{'[0-9a-f]' * _TOKEN_LENGTH}{_PART}"):
        lock = _lock(part)
        if lock is not None:
            delete(part)
            os.close(lock)


def _new_part(path: Path) -> Path:
    # Without the checkpoint's name, in which Lightning looks for hpc_ckpt_ and a number.
    return path.with_name(f"{_BEING_WRITTEN}.{secrets.token_hex(_TOKEN_LENGTH // 2)}{_PART}")


def _aside(path: Path) -> Path:
    """Return where a checkpoint waits until the new one is at its place.

    ``last.ckpt`` waits at ``last.being-replaced.ckpt``, where ``ckpt_path="last"`` finds it too.
    """
    return path.with_name(f"{path.stem}.being-replaced{path.suffix}")


def _lock(part: Path) -> int | None:
    """Lock a part as one that is being written; None if it is, or if nobody can tell.

    The lock ends with the process, however that ends.
    """
    try:
        descriptor = os.open(part, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by another, or the file system has no locks
        os.close(descriptor)
        return None
    return descriptor


def is_remote(path: str | Path) -> bool:
    """Whether a path is a URL, which fsspec writes to."""
    return "://" in str(path)


def _flush(path: Path) -> None:
    """Let the file or the folder's files reach the disk before their name does."""
    for file in path.iterdir() if path.is_dir() else (path,):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where that cannot be done."""
    # Python has no renameat2, and rename refuses a folder that is not empty.
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    here = _AT_CURRENT_FOLDER
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), _EXCHANGE) == 0)

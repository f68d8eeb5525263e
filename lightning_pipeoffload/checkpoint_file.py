"""Checkpoints that a kill cannot spoil: written to a new place, then moved to where they belong."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

_NEW = ".part"
_OLD = ".old"
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
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        part = part_of(path)
        part.parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, part)
        move_into_place(part, Path(path))


def part_of(path: str | Path) -> Path:
    """Return where a checkpoint is written before it is moved to ``path``; nothing is there.

    What a killed run left there is deleted.
    """
    part = Path(f"{path}{_NEW}")
    delete(part)
    return part


def move_into_place(part: Path, path: Path) -> None:
    """Move a file or a folder to ``path``; at any moment the old or the new one is there, whole.

    Where the file system cannot exchange two names, a folder is moved to ``path`` + ".old" first.
    """
    _flush(part)
    if not os.path.lexists(path) or not (part.is_dir() or path.is_dir()):
        part.replace(path)
        return
    old = part
    if not _exchange(part, path):
        old = Path(f"{path}{_OLD}")
        delete(old)
        path.rename(old)
        part.rename(path)
    delete(old)


def delete(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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

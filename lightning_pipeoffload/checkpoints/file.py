"""Checkpoint files: replaced when they are complete, and read one tensor at a time.

A checkpoint is written under another name and then moved, so that at any moment, even after a kill,
there is a complete one, the old or the new::

    being-written.NODE.1a2b3c4d.part   new: written, flushed   |
    last.ckpt                          old                     |   new     a file, in one step

    being-written.NODE.1a2b3c4d.part   new    |   new   |
    last.ckpt                          old    |         |   new            a folder
    last.being-replaced.ckpt                  |   old   |   old    | deleted
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import secrets
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch import Tensor
from torch.utils._pytree import (  # private: see runtime/leaves
    KeyPath,
    keystr,
    tree_map_with_path,
)
from typing_extensions import override

from lightning_pipeoffload.runtime import StoredTensor

_ZIP_MAGIC = b"PK\x03\x04"
# The entries of a checkpoint of which each rank needs only its own part.
_OF_RANKS = re.compile(r"\['state_dict'\]|\['optimizer_states'\]\[\d+\]\['state'\]")
_LIBC = ctypes.CDLL(None)
_BEING_WRITTEN = "being-written"  # a name that no other program gives
_PART = ".part"
_TOKEN_LENGTH = 8
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# An unfinished file that nothing was written to for so long is that of a killed run.
_DEAD_SECONDS = 24 * 3600.0


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a local file next to its destination and moves it; writes URLs as Lightning does.

    Lightning writes to the system's temporary folder. A move between disks is a copy, and a kill
    during the copy would leave half a file in place of the old checkpoint.
    """

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        if is_remote(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        with replace_atomically(path) as part, part.open("wb") as file, showing_first_error():
            torch.save(checkpoint, file)  # given a path it hides why it could not write

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = path_or_backup(path)
        with naming_damaged(path):
            if map_location is None and not is_remote(path) and is_torch_zip(path):
                return load_lazily(path, weights_only, _OF_RANKS)
            return super().load_checkpoint(path, map_location or map_to_host, weights_only)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        if is_remote(path):
            super().remove_checkpoint(path)
            return
        if os.path.lexists(path):
            part = _temporary_path(Path(path))
            os.rename(path, part)  # a folder goes file by file, and half of one is no checkpoint
            delete(part)


@contextmanager
def naming_damaged(path: str | Path) -> Iterator[None]:
    """Name the file in the errors that torch raises of a truncated one.

    Raises:
        RuntimeError: The file is not a whole one.
    """
    try:
        yield
    except FileNotFoundError:  # fsspec's has no filename
        raise
    except (EOFError, OSError, RuntimeError) as error:
        is_named = isinstance(error, OSError) and error.filename is not None
        if is_named or (type(error) is RuntimeError and "PytorchStreamReader" not in str(error)):
            raise
        reason = str(error).partition("\n")[0] or "it ends too early"
        raise RuntimeError(f"{path} is damaged, or not a whole file: {reason}") from error


def is_torch_zip(path: str | Path) -> bool:
    """Return whether a file was written by ``torch.save``, in its format since torch 1.6."""
    if not Path(path).is_file():
        return False
    with Path(path).open("rb") as file:
        return file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC


def load_lazily(path: str | Path, weights_only: bool | None, is_later: re.Pattern[str]) -> Any:
    """Load a file of ``torch.save`` to the host; read each tensor only when it is used.

    Args:
        path: The path of the file.
        weights_only: Whether to refuse anything but plain data; None: torch's default.
        is_later: Matches the keys, such as "['state_dict']['head.weight']", of tensors that are
            read when they are used; others are read now.
    """
    copied: dict[int, Any] = {}

    def load(keys: KeyPath, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        is_plain = type(leaf) is Tensor and leaf.layout is torch.strided
        if is_plain and is_later.match(keystr(keys)):
            return to_stored_tensor(leaf)
        return deepcopy(leaf, copied)

    mapped = torch.load(path, map_location=map_to_host, mmap=True, weights_only=weights_only)
    loaded = tree_map_with_path(load, mapped)
    return copy_state_dict_metadata(loaded, mapped) if isinstance(mapped, dict) else loaded


def copy_state_dict_metadata(
    checkpoint: dict[str, Any], source: Mapping[str, Any]
) -> dict[str, Any]:
    """Give the state dicts of a checkpoint the versions that those of ``source`` have."""
    for key, state in source.items():
        if hasattr(state, "_metadata"):
            checkpoint[key] = state_dict_of(checkpoint[key], like=state)
    return checkpoint


def state_dict_of(entries: Mapping[str, Any], like: Any) -> OrderedDict[str, Any]:
    """Return a state dict with the versions of the modules of another, by which torch loads it."""
    state: Any = OrderedDict(entries)
    if hasattr(like, "_metadata"):  # private: the versions
        state._metadata = like._metadata
    return state


def to_stored_tensor(mapped: Tensor) -> StoredTensor:
    """Return a tensor that is copied from a mapped file each time it is used."""
    return StoredTensor(mapped.to("meta"), partial(_copy_and_release, mapped))


def _copy_and_release(mapped: Tensor) -> Tensor:
    value = mapped.clone()
    # Otherwise its pages would count as this process's memory while the file is mapped.
    start = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = mapped.data_ptr() + mapped.nbytes - start
    if size:
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
    return value


def map_to_host(storage: Any, location: str) -> Any:
    """Load a storage to the host from any device, as a ``map_location``."""
    return storage


@contextmanager
def replace_atomically(path: str | Path, folder: bool = False) -> Iterator[Path]:
    """Yield the path of a new file or folder, which is moved to ``path`` when the block ends.

    If the block raises, the new file is deleted and ``path`` is unchanged. Unfinished files of
    killed runs in the same folder are deleted first: they may fill the disk.

    Raises:
        OSError: Writing failed, as on a full disk; the message names the checkpoint.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    delete_leftovers(path.parent)
    part, lock = _create_locked_part(path, folder)
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


def _create_locked_part(path: Path, folder: bool) -> tuple[Path, int | None]:
    while True:
        part = _temporary_path(path)
        part.mkdir() if folder else part.touch()
        lock = _try_lock(part, waits=True)
        if part.exists():  # else a run that cleaned up has found it before it was locked
            return part, lock
        if lock is not None:
            os.close(lock)


@contextmanager
def showing_first_error() -> Iterator[None]:
    """Raise torch's error of the write, not the later error of closing the file."""
    try:
        yield
    except RuntimeError as error:
        if error.__context__ is None or "unexpected pos" not in str(error):
            raise
        raise error.__context__ from None


def _move_into_place(part: Path, path: Path) -> None:
    """Move a file or a folder to ``path``; at any moment the old or the new one is complete.

    Nothing is moved to the place of a folder with files, so that one is first renamed to a name
    that :func:`path_or_backup` finds.
    """
    _fsync_files(part)
    if not os.path.lexists(path) or not (part.is_dir() or path.is_dir()):
        part.replace(path)
        delete(_backup_path(path))
        return
    aside = _backup_path(path)
    delete(aside)
    path.rename(aside)
    part.rename(path)
    delete(aside)


def path_or_backup(path: str | Path) -> str | Path:
    """Return ``path``, or the name under which a kill during a move has left the checkpoint."""
    if is_remote(path) or os.path.lexists(path):
        return path
    aside = _backup_path(Path(path))
    return aside if aside.exists() else path


def delete(path: Path) -> None:
    """Delete a file, a link or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):  # another run deletes it too
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def delete_leftovers(folder: Path) -> None:
    """Delete the unfinished files of killed runs in a folder, not those of running ones.

    Many shared file systems show a lock on the node only that has made it. So a free lock decides
    about this node's files, and the time of the last write about those of other nodes.
    """
    token = "[0-9a-f]" * _TOKEN_LENGTH
    for part in folder.glob(f"{_BEING_WRITTEN}.{token}.{token}{_PART}"):
        lock = _try_lock(part)
        is_ours = part.name.split(".")[1] == _this_node()
        if (is_ours and lock is not None) or _idle_seconds(part) > _DEAD_SECONDS:
            delete(part)
        if lock is not None:
            os.close(lock)


def _idle_seconds(part: Path) -> float:
    """Return the seconds since a file, or one of a folder, was written; 0 if it is gone."""
    try:
        times = [path.stat().st_mtime for path in (part, *part.rglob("*"))]
    except FileNotFoundError:
        return 0.0
    return time.time() - max(times)


def _temporary_path(path: Path) -> Path:
    # Without the checkpoint's name: Lightning searches names for hpc_ckpt_ and a number.
    token = secrets.token_hex(_TOKEN_LENGTH // 2)
    return path.with_name(f"{_BEING_WRITTEN}.{_this_node()}.{token}{_PART}")


@cache
def _this_node() -> str:
    """Return a name of the running kernel, in which processes see each other's locks."""
    if _BOOT_ID.exists():
        return _BOOT_ID.read_text()[:_TOKEN_LENGTH]
    return f"{uuid.getnode():012x}"[-_TOKEN_LENGTH:]


def _backup_path(path: Path) -> Path:
    """Return the path to which an old checkpoint is renamed until the new one is in place.

    For ``last.ckpt`` it is ``last.being-replaced.ckpt``, which ``ckpt_path="last"`` finds too.
    """
    return path.with_name(f"{path.stem}.being-replaced{path.suffix}")


def _try_lock(part: Path, waits: bool = False) -> int | None:
    """Lock an unfinished file; None if another process holds it, or there are no file locks.

    The lock ends with the process, even when it is killed.
    """
    try:
        descriptor = os.open(part, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError:  # held by another, or the file system has no locks
        os.close(descriptor)
        return None
    return descriptor


def is_remote(path: str | Path) -> bool:
    """Return whether a path is a URL, which is written with fsspec."""
    return "://" in str(path)


def _fsync_files(path: Path) -> None:
    """Flush the file, or the folder's files, to the disk before the move."""
    for file in path.iterdir() if path.is_dir() else (path,):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

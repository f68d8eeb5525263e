"""Memory of each rank that the ranks of its machine read and write without its doing.

On the host it is a file in memory that all map, whose name is gone as soon as they have: so nothing
is left of it when they are killed. On an accelerator it is what ``torch.multiprocessing`` shares
between processes.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from lightning_pipeoffload.runtime.host_group import HostGroup

_PREFIX = "pipeoffload-odc-"


def share_bytes(size: int, device: torch.device, rank: int, group: HostGroup) -> list[Tensor]:
    """Make memory of this rank's that others see; all ranks call it, with one size.

    Args:
        size: How many bytes.
        device: Where they lie.
        rank: This rank's place in ``group``.
        group: The ranks of this machine that share parameters.

    Returns:
        The bytes of each rank, all zero.

    Raises:
        RuntimeError: The memory of a rank's machine does not suffice.
    """
    if device.type == "cpu":
        return _share_host_bytes(max(size, 1), group)
    return _share_device_bytes(max(size, 1), device, rank, group)


def _share_device_bytes(
    size: int, device: torch.device, rank: int, group: HostGroup
) -> list[Tensor]:
    own = torch.zeros(size, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize(device)
    others = [peer for peer in group.gather(rank) if peer != rank]
    # One for each: torch counts who still uses it, and is told once by whom each was made for.
    offers = group.gather({peer: reduce_tensor(own) for peer in others})
    return [
        own if peer == rank else _opened(offer[rank], device, peer)
        for peer, offer in enumerate(offers)
    ]


def _opened(reduction: Any, device: torch.device, peer: int) -> Tensor:
    """Map another rank's memory into this rank's own device.

    Elsewhere it would be a tensor of the other device, which takes a context there for each rank
    and adds nothing to tensors of this one. No event is waited for: whoever shares has waited.
    """
    rebuild, args = reduction
    given = signature(rebuild).bind(*args)
    if "storage_device" not in given.arguments:
        raise RuntimeError(
            f"torch shares no memory of {device.type} between processes, which strategy='odc' "
            f"needs; it does on cpu and cuda"
        )
    # Private, both: how torch calls the place and the event of what a process has shared.
    given.arguments.update(storage_device=device.index, event_sync_required=False)
    try:
        return rebuild(*given.args)
    except RuntimeError as error:
        raise RuntimeError(
            f"{device} cannot read the memory of rank {peer} of this machine, which "
            f"strategy='odc' needs ({str(error).splitlines()[0]}); give it devices that reach each "
            f"other, as nvidia-smi topo -p2p r shows, one for each process, run all processes of a "
            f"machine in one container, and leave expandable_segments out of PYTORCH_ALLOC_CONF"
        ) from error


def _share_host_bytes(size: int, group: HostGroup) -> list[Tensor]:
    with _named_file(size) as (path, failure):
        found = group.gather((str(path), failure))
        for place, (_, failed) in enumerate(found):
            if failed:
                raise RuntimeError(f"rank {place} of this machine has no shared memory: {failed}")
        mapped = [
            torch.from_file(name, shared=True, size=size, dtype=torch.uint8) for name, _ in found
        ]
        group.barrier()
    return mapped


class OwnerLocks:
    """One lock for each rank's part of each group of parameters; a rank that ends lets go of them.

    Args:
        num_groups: The number of groups.
        rank: This rank's place in ``group``.
        group: The ranks of this machine that share parameters.
    """

    def __init__(self, num_groups: int, rank: int, group: HostGroup) -> None:
        self._num_groups = num_groups
        with _named_file(1) as (path, _):
            self._file = os.open(group.gather(str(path))[0], os.O_RDWR)
            group.barrier()

    def close(self) -> None:
        """Let the file go."""
        os.close(self._file)

    @contextmanager
    def held(self, owner: int, index: int) -> Iterator[None]:
        """Hold the lock of one rank's part of one group."""
        place = owner * self._num_groups + index
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, place)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)


def remove_left_files() -> None:
    """Remove files of ranks that were killed between making and mapping them.

    Who makes one holds a lock on it as long as its name is there.
    """
    for path in _folder().glob(f"{_PREFIX}*"):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        except OSError as error:  # in use, gone by now, or another user's
            if error.errno not in (errno.EAGAIN, errno.ENOENT, errno.EACCES, errno.EPERM):
                raise


@contextmanager
def _named_file(size: int) -> Iterator[tuple[Path, str]]:
    """Make a file for as long as it needs a name; yield its path, and why it is none."""
    path, file = _locked_file()
    with file:
        try:
            yield path, _reserve(file, size)
        finally:
            path.unlink(missing_ok=True)


def _locked_file() -> tuple[Path, IO[bytes]]:
    while True:
        path = _folder() / f"{_PREFIX}{secrets.token_hex(8)}"
        file = path.open("x+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()  # another run took it for a left one before it was locked


def _reserve(file: IO[bytes], size: int) -> str:
    """Take the memory now, for a write that finds none would end the process by a signal."""
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        free = os.statvfs(_folder())
        return (
            f"{_folder()} has {free.f_bavail * free.f_frsize >> 20} MiB left, and {size >> 20} MiB "
            f"are needed ({error.strerror}); enlarge it, as by docker run --shm-size"
        )
    return ""


def _folder() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())

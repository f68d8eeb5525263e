"""Memory of each rank that the other ranks of its machine can read and write.

On the host it is an anonymous file in memory that all ranks map; it disappears when they are
killed. On an accelerator ``torch.multiprocessing`` shares it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from typing_extensions import Self

from lightning_pipeoffload.runtime.comm.host_group import HostGroup
from lightning_pipeoffload.runtime.memory import machine_memory


def allocate_shared_memory(
    size: int, device: torch.device, rank: int, group: HostGroup
) -> list[Tensor]:
    """Allocate shared memory on each rank; all ranks call it with the same size.

    Args:
        size: Bytes of each rank.
        device: The device of the memory.
        rank: This rank among those of ``group``.
        group: The ranks of this machine that share parameters.

    Returns:
        The bytes of each rank, all zero.

    Raises:
        RuntimeError: A machine has too little memory.
    """
    if device.type == "cpu":
        return _share_host_bytes(max(size, 1), group)
    return _share_device_bytes(max(size, 1), device, rank, group)


def _share_device_bytes(
    size: int, device: torch.device, rank: int, group: HostGroup
) -> list[Tensor]:
    memory = torch.zeros(size, dtype=torch.uint8, device=device)
    torch.accelerator.synchronize(device)
    others = [peer for peer in group.gather(rank) if peer != rank]
    # A separate offer for each peer: torch counts references, and an offer can be opened once.
    offers = group.gather({peer: reduce_tensor(memory) for peer in others})
    return [
        memory if peer == rank else _map_peer_memory(offer[rank], device, peer)
        for peer, offer in enumerate(offers)
    ]


def _map_peer_memory(reduction: Any, device: torch.device, peer: int) -> Tensor:
    """Map another rank's memory as a tensor of this rank's device.

    A tensor of the other device would need a context there for each rank, and could not be added to
    tensors of this device. It waits for no event: the other rank has synchronized.
    """
    rebuild, args = reduction
    bound = signature(rebuild).bind(*args)
    if "storage_device" not in bound.arguments:
        raise RuntimeError(
            f"torch shares no memory of {device.type} between processes, which strategy='odc' "
            f"needs; it does on cpu and cuda"
        )
    # Private, both: the names of torch's arguments.
    bound.arguments.update(storage_device=device.index, event_sync_required=False)
    try:
        return rebuild(*bound.args)
    except RuntimeError as error:
        raise RuntimeError(
            f"{device} cannot read the memory of rank {peer} of this machine, which "
            f"strategy='odc' needs ({str(error).splitlines()[0]}); give it devices that reach each "
            f"other, as nvidia-smi topo -p2p r shows, one for each process, run all processes of a "
            f"machine in one container, and leave expandable_segments out of PYTORCH_ALLOC_CONF"
        ) from error


def _share_host_bytes(size: int, group: HostGroup) -> list[Tensor]:
    with MemoryFile() as file:
        files = group.gather((file.path, file.try_reserve(size)))
        for rank, (_, failure) in enumerate(files):
            if failure:
                raise RuntimeError(f"rank {rank} of this machine has no shared memory: {failure}")
        mapped = [map_file(theirs, size) for theirs, _ in files]
        group.barrier()
    return mapped


_NAME = "pipeoffload"


class MemoryFile:
    """An anonymous file in memory, which others can open by its path until it is closed.

    Attributes:
        path: The path, for processes of this machine.
    """

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create(_NAME), "r+b")
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def try_reserve(self, size: int) -> str:
        """Allocate the memory now, since a later write without memory would kill the process.

        Returns:
            The reason of a failure, or "".
        """
        machine = machine_memory()
        if machine.total and size > machine.available:
            return f"{size >> 20} MiB are needed, and {machine.available >> 20} MiB are free"
        os.posix_fallocate(self._file.fileno(), 0, size)
        return ""

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_memory_file(path: str) -> bytes:
    """Return the bytes of a memory file; none where this process cannot open it.

    On another machine, or in another container, the path may be that of something else.
    """
    try:
        is_memory = os.readlink(path).startswith(f"/memfd:{_NAME} ")
        return Path(path).read_bytes() if is_memory else b""
    except OSError:
        return b""


def map_file(path: str, size: int) -> Tensor:
    """Return the bytes of a memory file, which all who map it share."""
    with torch.inference_mode(False):  # a validation may come first
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


class OwnerLocks:
    """A lock for each rank's part of each group; the system releases locks of ended processes.

    Args:
        num_groups: The number of groups of parameters.
        rank: This rank among those of ``group``.
        group: The ranks of this machine that share parameters.
    """

    def __init__(self, num_groups: int, rank: int, group: HostGroup) -> None:
        self._num_groups = num_groups
        with MemoryFile() as file:
            self._file = os.open(group.gather(file.path)[0], os.O_RDWR)
            group.barrier()

    def close(self) -> None:
        """Close the file of locks."""
        os.close(self._file)

    @contextmanager
    def hold_lock(self, owner: int, index: int) -> Iterator[None]:
        """Hold the lock of one rank's part of one group."""
        place = owner * self._num_groups + index
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, place)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

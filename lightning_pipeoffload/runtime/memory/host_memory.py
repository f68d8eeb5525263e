"""Host memory for offloaded activations: pinned pieces that are allocated once and reused.

A pinned allocation takes milliseconds and waits for all work queued on the device, including
messages of ranks that wait too. So all memory of a plan is reserved before its first step. torch
rounds each pinned allocation up to a power of two, at most doubling it; so a slab consists of a few
pieces whose sizes are powers of two (PipeOffload, section 5, packs into three such bins).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_pipeoffload.schedule import bytes_text

_SMALLEST_PIECE = 1 << 12
_MOST_PIECES = 4  # the last one is at most half empty: less than an eighth of the slab
# The size of a staging buffer, through which parameters are copied to an optimizer on the host.
STAGING_BYTES = 64 << 20
_LEFT_FREE = 0.05  # of the machine's memory, for other programs
# For each version of Linux control groups: folder, files of limit and usage, and the row of
# memory.stat with the page cache, which counts as used although the kernel can free it.
_CONTROL_GROUPS = {
    1: (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
    2: ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
}


class HostMemoryError(RuntimeError):
    """The host has too little memory for offloaded tensors."""


@dataclass(frozen=True)
class HostBudget:
    """The most bytes of host memory that one rank may use.

    Attributes:
        origin: The origin of that number, for error messages.
    """

    num_bytes: int
    origin: str

    @classmethod
    def configured(cls, num_bytes: int, text: str = "") -> HostBudget:
        return cls(num_bytes, f"host_memory_limit is {text or bytes_text(num_bytes)}")

    @classmethod
    def share_of_machine(cls, num_local_ranks: int) -> HostBudget | None:
        """Divide the machine's available memory, less a reserve; None if it is not known.

        To be called before any of the machine's ``num_local_ranks`` ranks has allocated.
        """
        total, available = machine_memory()
        if not total:
            return None
        share = max(0, int(available - _LEFT_FREE * total) // num_local_ranks)
        ranks = f"{num_local_ranks} ranks" if num_local_ranks > 1 else "one rank"
        origin = (
            f"{bytes_text(share)} is a rank's share of the {bytes_text(available)} that the machine"
        )
        return cls(share, f"{origin} had left for {ranks}")

    def less_optimizer_bytes(self, num_bytes: float) -> HostBudget:
        """Return the budget less ``num_bytes`` for the optimizer."""
        origin = f"{self.origin}, of which the optimizer takes {bytes_text(num_bytes)}"
        return replace(self, num_bytes=int(self.num_bytes - num_bytes), origin=origin)


class HostMemory:
    """The pool of host memory of one rank.

    Args:
        pinned: Whether to pin the memory, so that copies overlap with computation.
        budget: The most bytes to allocate; None: as many as the machine has.

    Attributes:
        budget: The given budget less the optimizer's bytes; None: no limit.
        allocated_bytes: The bytes allocated so far; pieces are reused and never freed.
        num_allocations: The number of allocations so far; constant once all sizes are known.
    """

    def __init__(self, pinned: bool, budget: HostBudget | None = None) -> None:
        self.budget = self._whole_budget = budget
        self.allocated_bytes = 0
        self.num_allocations = 0
        self._pinned = pinned
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def subtract_optimizer_bytes(self, num_bytes: int, num_present: int, parts: str) -> None:
        """Subtract the memory that the optimizer allocates from the budget.

        Args:
            num_bytes: The optimizer's bytes in total.
            num_present: The bytes of it that are already allocated.
            parts: A description of ``num_bytes``, for the error.

        Raises:
            HostMemoryError: The host has too little memory for the optimizer.
        """
        total, available = machine_memory()
        budget, reason = self._whole_budget, ""
        if budget is not None and num_bytes > budget.num_bytes:
            reason = budget.origin
        elif total and available - (num_bytes - num_present) < _LEFT_FREE * total:
            reason = f"the machine has {bytes_text(available)} left and would swap"
        if reason:
            raise HostMemoryError(
                f"optimizer_offload=True takes {bytes_text(num_bytes)} of this rank's host memory "
                f"({parts}), and {reason}; allow more with host_memory_limit if the machine has "
                f'it, or use more ranks, sharding="optimizer", or an optimizer that keeps less'
            )
        self.budget = None if budget is None else budget.less_optimizer_bytes(num_bytes)

    def acquire(self, num_bytes: int) -> Slab:
        """Allocate a slab of ``num_bytes``, or raise :class:`HostMemoryError`."""
        return Slab(self, [self._pop_piece(size) for size in piece_sizes(num_bytes)])

    def preallocate(self, slabs: Iterable[tuple[Hashable, int]]) -> None:
        """Allocate all slabs that a plan needs, before it runs.

        Args:
            slabs: In the plan's order, the name of a slab with its bytes, or with 0 where it is
                returned.
        """
        held: dict[Hashable, Slab] = {}
        for name, num_bytes in slabs:
            if name in held:
                held.pop(name).release()
            if num_bytes:
                held[name] = self.acquire(num_bytes)
        for slab in held.values():
            slab.release()

    def release(self, pieces: list[Tensor]) -> None:
        """Return pieces to the pool, once the compute stream waits for their last copy."""
        for piece in pieces:
            self._free[piece.numel()].append(piece)

    def _pop_piece(self, size: int) -> Tensor:
        if self._free[size]:
            return self._free[size].pop()
        self._check_room(size)
        with torch.inference_mode(False):  # a validation may come first
            try:
                piece = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise self._exhausted(size, f"the allocation failed: {reason}") from error
        self.allocated_bytes += size
        self.num_allocations += 1
        return piece

    def _check_room(self, size: int) -> None:
        if self.budget is not None and self.allocated_bytes + size > self.budget.num_bytes:
            raise self._exhausted(size, self.budget.origin)
        total, available = machine_memory()
        if total and available - size < _LEFT_FREE * total:
            raise self._exhausted(
                size, f"the machine has {bytes_text(available)} left and would swap"
            )

    def _exhausted(self, size: int, reason: str) -> HostMemoryError:
        return HostMemoryError(
            f"host memory for offloading is exhausted: {bytes_text(size)} more than the "
            f"{bytes_text(self.allocated_bytes)} in use are needed, and {reason}; offload less, "
            f'use recompute="cheap", or allow more with host_memory_limit if the machine has it'
        )


class Slab:
    """Host memory for several tensors of a stage and microbatch; see :meth:`HostMemory.acquire`."""

    def __init__(self, memory: HostMemory, pieces: list[Tensor]) -> None:
        self._memory = memory
        self._pieces = pieces

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (offset from ``start``, bytes) of a range, which may cross pieces."""
        first = 0
        for piece in self._pieces:
            low, high = max(start, first), min(stop, first + piece.numel())
            if low < high:
                yield low - start, piece[low - first : high - first]
            first += piece.numel()

    def release(self) -> None:
        pieces, self._pieces = self._pieces, []
        self._memory.release(pieces)


def piece_sizes(num_bytes: int) -> list[int]:
    """Split ``num_bytes`` into powers of two, largest first; the last one is rounded up."""
    sizes: list[int] = []
    while num_bytes > 0:
        last = len(sizes) == _MOST_PIECES - 1 or num_bytes <= _SMALLEST_PIECE
        exponent = (num_bytes - 1).bit_length() if last else num_bytes.bit_length() - 1
        sizes.append(max(1 << exponent, _SMALLEST_PIECE))
        num_bytes -= sizes[-1]
    return sizes


def staging_bytes(sizes: Sequence[int], by_bucket: bool) -> int:
    """Return the largest total of the staging buffers of an optimizer on the host.

    Args:
        sizes: Bytes of each parameter with its gradient.
        by_bucket: Whether the optimizer may step some parameters at a time.
    """
    if not by_bucket or sum(sizes) <= STAGING_BYTES:
        return sum(sizes)
    return 2 * round_pinned(max(STAGING_BYTES, *sizes))


def gradient_bytes(parameter: Tensor) -> int:
    """Return the bytes of a parameter's gradient, which may have a dtype of its own."""
    dtype: torch.dtype | None = parameter.grad_dtype  # None: any
    return parameter.numel() * (dtype or parameter.dtype).itemsize


def round_pinned(num_bytes: int) -> int:
    """Return the bytes that torch allocates for ``num_bytes`` pinned bytes: a power of two."""
    return 1 << (num_bytes - 1).bit_length()


def slab_bytes(num_bytes: float) -> int:
    """Return the bytes of host memory that a slab of ``num_bytes`` takes."""
    return sum(piece_sizes(ceil(num_bytes)))


class MachineMemory(NamedTuple):
    """Bytes of a machine or container; ``total`` is 0 if it is not known.

    Attributes:
        available: Bytes that can be allocated without swapping.
    """

    total: int
    available: int


def machine_memory(root: Path = Path("/")) -> MachineMemory:
    """Return the minimum of the machine's memory and this process's control group limits.

    Args:
        root: The root of the file system.
    """
    meminfo = root / "proc/meminfo"
    if not meminfo.exists():
        return MachineMemory(0, 0)
    rows = _table(meminfo)
    machine = MachineMemory(1024 * rows["MemTotal:"], 1024 * rows["MemAvailable:"])
    limits = [machine, *_control_groups(root)]
    return MachineMemory(min(m.total for m in limits), min(m.available for m in limits))


def _control_groups(root: Path) -> Iterator[MachineMemory]:
    """Yield the limits of this process's control group and of its parents, if they have any."""
    listing = root / "proc/self/cgroup"
    for line in listing.read_text().splitlines() if listing.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top, limit_file, usage_file, cached_row = _CONTROL_GROUPS[1 if controllers else 2]
        names = path.strip("/").split("/")
        # In a container the path may be the host's, and the container's own group is the top.
        for depth in range(len(names) + 1):
            folder = root.joinpath(top, *names[:depth])
            limit = folder / limit_file
            if not limit.exists() or (text := limit.read_text().strip()) == "max":
                continue
            used = int((folder / usage_file).read_text())
            cached = _table(folder / "memory.stat").get(cached_row, 0)
            yield MachineMemory(int(text), max(0, int(text) - used + cached))


def _table(path: Path) -> dict[str, int]:
    """Read a file of lines, each a name and a number."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows}

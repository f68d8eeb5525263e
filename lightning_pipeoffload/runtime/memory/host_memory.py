"""Host memory for offloaded activations: pinned pieces that are allocated once and reused.

A pinned allocation costs milliseconds and waits for all that the device was given, messages of
ranks that wait likewise among it. So what a plan needs is reserved before its first step. torch
rounds each up to a power of two, up to twice of what was asked for; a slab is therefore made of a
few pieces whose sizes are powers of two already (PipeOffload, section 5, packs into three such
bins).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.memory.machine_memory import machine_memory
from lightning_pipeoffload.schedule.quantities import bytes_text

_SMALLEST_PIECE = 1 << 12
_MOST_PIECES = 4  # the last one is at most half empty: less than an eighth of the slab
_LEFT_FREE = 0.05  # of the machine's memory, for whoever else needs some


class HostMemoryError(RuntimeError):
    """There is no room on the host for what the plan offloads."""


@dataclass(frozen=True)
class HostBudget:
    """The most that one rank may take of its host's memory.

    Attributes:
        num_bytes: The most bytes that the rank may take.
        origin: Where that number is from, for errors.
    """

    num_bytes: int
    origin: str

    @classmethod
    def given(cls, num_bytes: int) -> HostBudget:
        """Make what the user asked for."""
        return cls(num_bytes, f"host_memory_limit is {bytes_text(num_bytes)}")

    @classmethod
    def share_of_machine(cls, num_local_ranks: int) -> HostBudget | None:
        """Divide what the machine has left, but for a reserve; None where it does not tell.

        To be called when no rank has taken any yet.

        Args:
            num_local_ranks: Ranks on this machine.
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


class HostMemory:
    """The pool of host memory of one rank.

    Args:
        pinned: Whether the device can copy from and to it while it computes.
        budget: The most to allocate; None: as much as the machine has.

    Attributes:
        allocated_bytes: The allocated bytes of all pieces.
        num_allocations: Allocations so far; it does not grow in a step whose sizes were known.
    """

    def __init__(self, pinned: bool, budget: HostBudget | None = None) -> None:
        self.budget = budget
        self.allocated_bytes = 0
        self.num_allocations = 0
        self._pinned = pinned
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)

    def take(self, num_bytes: int) -> Slab:
        """Return room for ``num_bytes``.

        Raises:
            HostMemoryError: The budget, or the machine's memory, does not allow it.
        """
        return Slab(self, [self._take_piece(size) for size in piece_sizes(num_bytes)])

    def reserve(self, slabs: Iterable[tuple[Hashable, int]]) -> None:
        """Have room for what is taken and given back in an order, before anything is.

        Args:
            slabs: What each slab is for, and its bytes; 0 where it is given back.

        Raises:
            HostMemoryError: The budget, or the machine's memory, does not allow it.
        """
        held: dict[Hashable, Slab] = {}
        for purpose, num_bytes in slabs:
            if purpose in held:
                held.pop(purpose).give_back()
            if num_bytes:
                held[purpose] = self.take(num_bytes)
        for slab in held.values():
            slab.give_back()

    def give_back(self, pieces: list[Tensor]) -> None:
        """Let others reuse ``pieces``, once the compute lane has waited for their last copy."""
        for piece in pieces:
            self._free[piece.numel()].append(piece)

    def _take_piece(self, size: int) -> Tensor:
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
        budget = self.budget
        if budget is not None and self.allocated_bytes + size > budget.num_bytes:
            raise self._exhausted(size, budget.origin)
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
    """Room for several tensors of one stage and microbatch; see :meth:`HostMemory.take`."""

    def __init__(self, memory: HostMemory, pieces: list[Tensor]) -> None:
        self._memory = memory
        self._pieces = pieces

    def parts(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (offset, bytes) for the range from ``start`` to ``stop``, which may cross pieces.

        The offset counts from ``start``.
        """
        first = 0
        for piece in self._pieces:
            low, high = max(start, first), min(stop, first + piece.numel())
            if low < high:
                yield low - start, piece[low - first : high - first]
            first += piece.numel()

    def give_back(self) -> None:
        """Return the room to the pool."""
        pieces, self._pieces = self._pieces, []
        self._memory.give_back(pieces)


def piece_sizes(num_bytes: int) -> list[int]:
    """Split into powers of two, largest first; the last one covers what is left."""
    sizes: list[int] = []
    while num_bytes > 0:
        last = len(sizes) == _MOST_PIECES - 1 or num_bytes <= _SMALLEST_PIECE
        exponent = (num_bytes - 1).bit_length() if last else num_bytes.bit_length() - 1
        sizes.append(max(1 << exponent, _SMALLEST_PIECE))
        num_bytes -= sizes[-1]
    return sizes


def slab_bytes(num_bytes: float) -> int:
    """Return what a slab of ``num_bytes`` takes of the host's memory."""
    return sum(piece_sizes(ceil(num_bytes)))

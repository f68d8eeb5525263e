"""Sums over replicas of which only one replica, the owner, gets the result.

All replicas need a sum where each of them steps the parameter. Where one steps it, for all, the sum
need not travel back, and half of the bytes of an all-reduce suffice: each replica sends (R-1)/R of
its gradients. The collective depends on the backend::

    gloo    all_to_all_single: each replica sends every owner its part; the owner adds the parts in
            the order of the replicas, so the bits do not depend on how messages travel. gloo's own
            reduce sends half as much again, its reduce_scatter as much as an all-reduce
    others  reduce, a call for each owner: NCCL passes a chain along its ring, and adds in place

With gloo an owner has to receive the parts of all replicas before it adds them. So a large tensor
is sent in pieces, and no more of them are on their way than fit a bounded memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime.comm.transport import as_bytes, wait_for
from lightning_pipeoffload.runtime.device import unprofiled

SUMMING = "lost a replica while summing gradients"
_PIECE_BYTES = 16 << 20
_MOST_RECEIVED = 128 << 20  # bytes on their way to a replica


class SumsToOwners:
    """The sums of one step, which all replicas start in the same order.

    Args:
        group: The group of the replicas.
        replica: The replica of this process.
        counterparts: The global rank of each replica.
    """

    def __init__(self, group: Any, replica: int, counterparts: Sequence[int]) -> None:
        self._group, self._replica, self._counterparts = group, replica, counterparts
        self._adds_parts = dist.get_backend(group) == "gloo"
        self._queue: deque[_Piece] = deque()
        self._sent: deque[_Piece] = deque()

    def start(self, flat: Tensor, lengths: Sequence[int]) -> Callable[[], None]:
        """Start to sum a contiguous tensor over the replicas, each part on its owner.

        Args:
            flat: One dimension: the part of replica 0, that of replica 1 and so on. This replica's
                part is the sum afterwards; the others have no defined value.
            lengths: The elements of each part.

        Returns:
            A function that waits for the sum; on an accelerator the stream waits.
        """
        if not self._adds_parts:
            return self._start_reduces(flat, lengths)
        pieces = [_Piece(*piece, self._replica) for piece in _split_into_pieces(flat, lengths)]
        self._queue.extend(pieces)
        self._advance()

        def wait() -> None:
            while not all(piece.is_summed for piece in pieces):
                self._advance(waits=True)

        return wait

    def _start_reduces(self, flat: Tensor, lengths: Sequence[int]) -> Callable[[], None]:
        parts = zip(self._counterparts, flat.split([*lengths]), strict=True)
        with unprofiled():
            works = [
                dist.reduce(part, owner, group=self._group, async_op=True)
                for owner, part in parts
                if len(part)
            ]

        def wait() -> None:
            for work in works:
                wait_for(work, SUMMING)

        return wait

    def _advance(self, waits: bool = False) -> None:
        """Add the pieces that have come, and send more in their order; ``waits`` for the next."""
        while self._sent and (waits or self._sent[0].has_come):
            self._sent.popleft().add()
            waits = False
        while self._queue and self._has_room_for(self._queue[0]):
            piece = self._queue.popleft()
            with unprofiled():
                piece.start_exchange(self._group)
            self._sent.append(piece)

    def _has_room_for(self, piece: _Piece) -> bool:
        received = sum(each.num_received for each in self._sent)
        return not self._sent or received + piece.num_received <= _MOST_RECEIVED


class _Piece:
    """Part of the summed gradients, contiguous in memory, in the order of the owners."""

    is_summed = False

    def __init__(self, data: Tensor, lengths: Sequence[int], replica: int) -> None:
        self._data, self._lengths, self._replica = data, lengths, replica
        self.num_received = len(lengths) * lengths[replica] * data.itemsize

    def start_exchange(self, group: Any) -> None:
        size, num_replicas = self._data.itemsize, len(self._lengths)
        own_length = self._lengths[self._replica]
        self._received = self._data.new_empty(num_replicas, own_length)
        self._work = dist.all_to_all_single(
            as_bytes(self._received),
            as_bytes(self._data),
            [own_length * size] * num_replicas,
            [length * size for length in self._lengths],
            group=group,
            async_op=True,
        )

    @property
    def has_come(self) -> bool:
        return bool(self._work.is_completed())

    @torch.no_grad()
    def add(self) -> None:
        """Wait for the parts, and add them in the order of the replicas."""
        wait_for(self._work, SUMMING)
        total, *others = self._received
        for part in others:
            total.add_(part)
        self._data.split([*self._lengths])[self._replica].copy_(total)
        self.is_summed = True
        del self._received, self._work


def _split_into_pieces(flat: Tensor, lengths: Sequence[int]) -> Iterator[tuple[Tensor, list[int]]]:
    """Cut a tensor of one owner into pieces; tensors of several owners are small."""
    size = _PIECE_BYTES // flat.itemsize
    if max(lengths) < len(flat) or len(flat) <= size:
        yield flat, [*lengths]
        return
    for piece in flat.split(size):
        yield piece, [len(piece) if length else 0 for length in lengths]

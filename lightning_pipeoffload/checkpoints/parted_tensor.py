"""Tensors of which each replica has a piece, as a checkpoint has them.

What a hook sees of them has a shape and no value, as what other ranks have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_pipeoffload.optimizers.step_shares import Piece
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly

_Box = tuple[tuple[int, ...], tuple[int, ...]]


class PartedTensor(ShapeOnly):
    """The shape of a tensor, and the piece that this replica has.

    To torch's distributed checkpoint it is the boxes that make up that piece.

    Attributes:
        pieces: The pieces of all replicas.
        start: Where this replica's piece starts.
        held: The values of that piece; None where it has none.
    """

    pieces: Sequence[Piece]
    start: int
    held: Tensor | None

    @classmethod
    def of(
        cls, like: Tensor, pieces: Sequence[Piece], replica: int, held: Tensor | None
    ) -> PartedTensor:
        """Make one.

        Args:
            like: A tensor of the same shape and dtype.
            pieces: The pieces of all replicas.
            replica: This replica.
            held: The values of its piece; None where it has none.
        """
        meta = torch.empty(like.shape, dtype=like.dtype, device="meta")
        owners = ", ".join(str(piece.replica) for piece in pieces)
        origin = f"the optimizer's state (on replica {owners})"
        made = cls(meta, torch.device("cpu"), frozenset((origin,)))
        made.pieces = pieces
        made.start = sum(piece.start for piece in pieces if piece.replica == replica)
        made.held = held
        return made

    # Private: the two methods by which torch's distributed checkpoint asks a tensor for its shards.

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        """Tell torch's distributed checkpoint what this replica writes."""
        assert self.held is not None
        properties = TensorProperties.create_from_tensor(self.held)
        return [
            WriteItem(
                MetadataIndex(name, offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    properties,
                    self.shape,
                ),
            )
            for offsets, sizes in self._boxes()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Give torch's distributed checkpoint the values of a box."""
        assert self.held is not None
        sizes = next(sizes for offsets, sizes in self._boxes() if offsets == index.offset)
        assert index.offset is not None
        steps = zip(index.offset, self.meta.stride(), strict=True)
        start = sum(offset * stride for offset, stride in steps) - self.start
        return self.held.view(-1)[start : start + math.prod(sizes)].view(sizes)

    def _boxes(self) -> Iterator[_Box]:
        assert self.held is not None
        return boxes_of(self.shape, self.start, self.start + self.held.numel())


def boxes_of(shape: Sequence[int], start: int, end: int) -> Iterator[_Box]:
    """Yield the boxes, by offsets and sizes, that make up a range of a tensor laid out flat.

    Of a matrix that is at most a row's end, whole rows, and a row's beginning.
    """
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row
    if first > last:  # all of it is in one row
        yield from _boxes_in_row(shape, start, end)
        return
    yield from _boxes_in_row(shape, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _boxes_in_row(shape, last * row, end)


def _boxes_in_row(shape: Sequence[int], start: int, end: int) -> Iterator[_Box]:
    if start == end:
        return
    row = math.prod(shape[1:])
    number = start // row
    for offsets, sizes in boxes_of(shape[1:], start - number * row, end - number * row):
        yield (number, *offsets), (1, *sizes)

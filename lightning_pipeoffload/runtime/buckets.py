"""Tensors that travel together, small ones in one message, or that are shared out by size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

_MOST_BYTES = 25 << 20
_ALONE = 1 << 20  # a larger tensor travels from where it is, not copied into a bucket

_Key = TypeVar("_Key")


class Bundle:
    """Tensors that travel as one; a single one that is contiguous, from where it is.

    Args:
        tensors: The tensors, of one dtype; at least one.

    Attributes:
        flat: What travels, of one dimension.
    """

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._is_copy = len(tensors) > 1 or not tensors[0].is_contiguous()
        parts = [tensor.reshape(-1) for tensor in tensors]
        self.flat = torch.cat(parts) if self._is_copy else tensors[0].view(-1)

    @torch.no_grad()
    def unpack(self) -> None:
        """Let the tensors have what has arrived."""
        if self._is_copy:
            parts = self.flat.split([tensor.numel() for tensor in self._tensors])
            for tensor, part in zip(self._tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))


def in_buckets(tensors: Mapping[_Key, Tensor]) -> Iterator[list[_Key]]:
    """Put what is small together, in order; of one dtype."""
    part: list[_Key] = []
    num_bytes = 0
    for name, tensor in tensors.items():
        is_alone = tensor.nbytes >= _ALONE
        fits = part and tensors[part[0]].dtype == tensor.dtype
        if part and (is_alone or not fits or num_bytes + tensor.nbytes > _MOST_BYTES):
            yield part
            part, num_bytes = [], 0
        part.append(name)
        num_bytes += tensor.nbytes
        if is_alone:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part


def share_out(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Give each size to whoever has least, the largest first.

    Args:
        sizes: Bytes, in an order that is the same for all who decide.
        loads: What each already has; is added to.

    Returns:
        Who has each.
    """
    owners = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = loads.index(min(loads))
        loads[owners[place]] += sizes[place]
    return owners

"""Tensors that travel together: small ones in one message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from torch import Tensor

_MOST_BYTES = 25 << 20
_ALONE = 1 << 20  # a larger tensor travels from where it is, not copied into a bucket

_Key = TypeVar("_Key")


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

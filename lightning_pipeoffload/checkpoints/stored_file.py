"""Files of ``torch.save``, of which each tensor is read when it is used, if ever.

A mapping of the file would do alike, but what is read through it counts as this process's memory
for as long as one tensor of it is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_pipeoffload.checkpoints.value_places import leaves_with_places, with_values
from lightning_pipeoffload.runtime.stored_tensor import StoredTensor

_ZIP_MAGIC = b"PK\x03\x04"


def is_archive(path: str | Path) -> bool:
    """Whether a file is one that ``torch.save`` writes, in the format that it has since 1.6."""
    if not Path(path).is_file():
        return False
    with Path(path).open("rb") as file:
        return file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC


def load_later(
    path: str | Path, weights_only: bool | None, is_later: Callable[[tuple[Any, ...]], bool]
) -> Any:
    """Load what ``torch.save`` wrote, to the host.

    Args:
        path: The path of the file.
        weights_only: Whether to refuse what is not plain data; None: as torch does by default.
        is_later: Says of a tensor's place in dicts and lists, ("state_dict", "head.weight") say,
            whether it may be read when it is used; others are read now.
    """
    tree = torch.load(path, map_location=on_host, mmap=True, weights_only=weights_only)
    shapes = torch.load(path, map_location="meta", weights_only=weights_only)
    file = Path(path).open("rb")  # noqa: SIM115 - as long as a tensor needs it
    values: dict[tuple[Any, ...], Any] = {}
    copied: dict[int, Any] = {}
    found = dict(_tensors_in(tree))
    for place, meta in _tensors_in(shapes):
        is_plain = type(meta) is Tensor and meta.layout is torch.strided
        if is_plain and is_later(place):
            values[place] = StoredTensor(meta, partial(_read, file, meta))
        else:
            values[place] = deepcopy(found[place], copied)
    return with_values(tree, values)


def on_host(storage: Any, location: str) -> Any:
    """Load a storage to where it is read, whatever device it was on: ``torch.load`` calls this."""
    return storage


def _tensors_in(tree: Any) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    for place, leaf in leaves_with_places(tree):
        if isinstance(leaf, Tensor):
            yield place, leaf


def _read(file: BinaryIO, meta: Tensor) -> Tensor:
    if not meta.numel():
        return torch.empty_like(meta, device="cpu")
    last = sum((size - 1) * stride for size, stride in zip(meta.shape, meta.stride(), strict=True))
    data = torch.empty((last + 1) * meta.itemsize, dtype=torch.uint8)
    # Private: where torch found the storage of what it loads as a shape.
    start = meta.untyped_storage()._checkpoint_offset
    assert start is not None
    _fill(file, data.numpy().data, start + int(meta.storage_offset()) * meta.itemsize)
    return data.view(meta.dtype).as_strided(meta.shape, meta.stride())


def _fill(file: BinaryIO, room: memoryview, offset: int) -> None:
    while room:
        count = os.preadv(file.fileno(), [room], offset)
        if not count:
            raise ValueError(f"{file.name} ends early; it has changed since it was opened")
        room, offset = room[count:], offset + count

"""Folders of torch's distributed checkpoint, of which each tensor is read when it is used, if ever.

FSDPStrategy's have a tensor in several parts, by rank; torch's own planner puts them together.
"""

from __future__ import annotations

import os
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (  # type: ignore[attr-defined] # exported at run time
    DefaultLoadPlanner,
)
from torch.distributed.checkpoint._nested_dict import (
    unflatten_state_dict,  # private: the inverse of what save does
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from lightning_pipeoffload.checkpoints.metadata import METADATA_FILE, MetadataReader
from lightning_pipeoffload.runtime.stored_tensor import StoredTensor


class StoredFolder:
    """What is in a folder.

    Args:
        path: The path of the folder.
        weights_only: Whether to refuse what is not plain data; None: as torch does by default.

    Raises:
        ValueError: The folder's ``.metadata`` is not that of a checkpoint.
    """

    def __init__(self, path: Path, weights_only: bool | None) -> None:
        self._path = path
        self._weights_only = weights_only
        self._reader = MetadataReader(path)
        self._metadata = self._reader.read_metadata()
        self._written = self._stamp()

    def load(self, kinds: tuple[str, ...]) -> dict[str, Any]:
        """Return what was saved, with tensors that are read when they are used.

        Args:
            kinds: The first keys of what is wanted, "model" say, or how they begin.
        """
        places: dict[str, tuple[Any, ...]] = self._metadata.planner_data
        flat: dict[str, Any] = {}
        for key, entry in self._metadata.state_dict_metadata.items():
            if str(places[key][0]).startswith(kinds):
                flat[key] = None
                if isinstance(entry, TensorStorageMetadata):
                    meta = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
                    flat[key] = StoredTensor(meta, partial(self._read_tensor, key, meta))
        others = {key: None for key, value in flat.items() if value is None}
        self._read(others)
        return unflatten_state_dict({**flat, **others}, places)

    def _read_tensor(self, key: str, meta: Tensor) -> Tensor:
        room = {key: torch.empty_like(meta, device="cpu")}
        self._read(room)
        return room[key]

    def _read(self, flat: dict[str, Any]) -> None:
        """Read into a flat dict, alone: who needs a value is not known to the other ranks."""
        if self._stamp() != self._written:
            raise RuntimeError(f"the checkpoint {self._path} was replaced while it was read")
        planner = _CarefulPlanner(self._weights_only)
        planner.set_up_planner(flat, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        [plan] = self._reader.prepare_global_plan(planner.create_global_plan([plan]))
        self._reader.read_data(planner.finish_plan(plan), planner).wait()

    def _stamp(self) -> tuple[int, int]:
        status = os.stat(self._path / METADATA_FILE)
        return status.st_ino, status.st_mtime_ns


class _CarefulPlanner(DefaultLoadPlanner):
    """Fills a flat dict; what is no tensor is unpickled as carefully as was asked for."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    @override
    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        loaded = torch.load(value, weights_only=self._weights_only)
        self.state_dict[read_item.dest_index.fqn] = loaded

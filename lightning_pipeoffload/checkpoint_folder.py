"""The checkpoint as a folder: each rank writes what it owns, with torch's distributed checkpoint.

The layout is that of Lightning's FSDPStrategy (``model``, ``optimizer_0``, ``meta.pt``), so that
``python -m lightning.pytorch.utilities.consolidate_checkpoint`` makes one file of it, with the
optimizer's state by the names of the parameters.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (  # type: ignore[attr-defined] # exported at run time
    DefaultLoadPlanner,
    FileSystemReader,
    load,
    save,
)
from torch.distributed.checkpoint._nested_dict import (
    unflatten_state_dict,  # private: the inverse of what save does
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from lightning_pipeoffload.checkpoint_file import move_into_place, part_of
from lightning_pipeoffload.collectives import PipelineGroup
from lightning_pipeoffload.runtime.transport import blaming_peers

META_FILE = "meta.pt"


def is_checkpoint_folder(path: str | Path) -> bool:
    """Whether there is a checkpoint in FSDPStrategy's layout."""
    return (Path(path) / META_FILE).is_file()


def write_checkpoint_folder(checkpoint: dict[str, Any], path: Path, group: PipelineGroup) -> None:
    """Write a Lightning checkpoint; every rank calls this.

    Args:
        checkpoint: ``state_dict`` and ``optimizer_states`` are this rank's, the rest is that of
            global rank 0.
        path: of the folder, the same on every rank; what is there is replaced.
        group: the pipeline's processes.
    """
    part: Path | None = None
    if group.is_root:
        part = part_of(path)
        part.mkdir(parents=True)
    part = group.broadcast(part, group.root)
    rest = dict(checkpoint)
    states = {"model": rest.pop("state_dict")}
    for place, state in enumerate(rest.pop("optimizer_states", ())):
        states[f"optimizer_{place}"] = state
    # An empty dict would be an entry of its own, next to those that other ranks write below it.
    states = {key: state for key, state in states.items() if state}
    with blaming_peers("lost a rank while saving a checkpoint"):
        save(states, checkpoint_id=part, process_group=group.host_group)
    if group.is_root:
        torch.save(rest, part / META_FILE)
        move_into_place(part, path)


def read_checkpoint_folder(
    path: Path, rest: dict[str, Any], group: PipelineGroup, weights_only: bool | None
) -> dict[str, Any]:
    """Read the whole checkpoint, as Lightning's loops take it; every rank calls this.

    Args:
        path: of the folder.
        rest: what is in its ``meta.pt``.
        group: the pipeline's processes.
        weights_only: whether to refuse what is not plain data.
    """
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    flat = {key: _room_for(entry) for key, entry in metadata.state_dict_metadata.items()}
    with blaming_peers("lost a rank while reading a checkpoint"):
        load(
            flat,
            storage_reader=reader,
            planner=_CarefulPlanner(weights_only),
            process_group=group.host_group,
        )
    saved = unflatten_state_dict(flat, metadata.planner_data)
    checkpoint = {**rest, "state_dict": saved.pop("model")}
    if saved:
        checkpoint["optimizer_states"] = [saved[f"optimizer_{n}"] for n in range(len(saved))]
    return checkpoint


def _room_for(entry: TensorStorageMetadata | BytesStorageMetadata) -> Tensor | None:
    if isinstance(entry, TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    return None


class _CarefulPlanner(DefaultLoadPlanner):
    """Fills a flat dict; what is no tensor is unpickled as carefully as was asked for."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = bool(weights_only)

    @override
    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        loaded = torch.load(value, weights_only=self._weights_only)
        self.state_dict[read_item.dest_index.fqn] = loaded

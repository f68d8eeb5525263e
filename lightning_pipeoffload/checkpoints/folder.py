"""Checkpoint folders of torch's distributed checkpoint, to which each rank writes its tensors.

The layout is that of Lightning's FSDPStrategy (``model``, ``optimizer_0``, ``meta.pt``), so that
``python -m lightning.pytorch.utilities.consolidate_checkpoint`` converts it to one file, with the
optimizer's state by the names of the parameters. A tensor is read when it is used; torch's planner
joins a tensor that FSDP has written in several pieces.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io.wrapper import (
    _WrappingCheckpointIO,  # private: what AsyncCheckpointIO is
)
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint import (  # type: ignore[attr-defined] # exported at run time
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    SavePlan,
    SavePlanner,
    save,
)
from torch.distributed.checkpoint._nested_dict import (
    unflatten_state_dict,  # private: the inverse of what save does
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_pipeoffload.checkpoints.file import (
    AtomicCheckpointIO,
    is_remote,
    naming_damaged,
    replace_atomically,
    showing_first_error,
)
from lightning_pipeoffload.runtime import StoredTensor
from lightning_pipeoffload.runtime.comm import HostGroup, reporting_lost_peers
from lightning_pipeoffload.runtime.shapes import ShapeOnly

META_FILE = "meta.pt"
_METADATA_FILE = ".metadata"
# All names that a .metadata may refer to, by module.
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata"),
        *("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        "_MEM_FORMAT_ENCODING",
    },
    # The former module of two of them.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},  # returns one of torch's layouts by its name
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
}


def is_checkpoint_folder(path: str | Path) -> bool:
    """Return whether a path is a checkpoint in FSDPStrategy's layout."""
    return (Path(path) / META_FILE).is_file()


def refuse_incomplete_folder(path: Path) -> None:
    """Raise ``FileNotFoundError`` for a folder that is no checkpoint."""
    if path.is_dir():
        raise FileNotFoundError(
            f"the folder {path} has no {META_FILE}, which is written last: it is no checkpoint, or "
            f"not a whole one"
        )


class AtomicCheckpoints(ParallelStrategy):
    """Writes files with :class:`AtomicCheckpointIO`, also inside of a plugin that wraps another."""

    _save_distributed_checkpoint: bool

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = AtomicCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if self._save_distributed_checkpoint:
            raise ValueError(
                f"{type(io).__name__} writes files, but save_distributed_checkpoint=True writes a "
                f"folder; remove one of them"
            )
        if isinstance(io, _WrappingCheckpointIO):
            io.checkpoint_io = AtomicCheckpointIO()
        self._checkpoint_io = io


# Writing


def refuse_remote_folder(path: str | Path, storage_options: Any | None) -> None:
    """Refuse to write a folder to a URL, or with options for one."""
    if storage_options is not None or is_remote(path):
        raise ValueError(
            f"a checkpoint folder is written to a mounted disk, without storage_options; got "
            f"{path} and {storage_options!r}; set save_distributed_checkpoint=False"
        )


def write_checkpoint_folder(
    checkpoint: dict[str, Any], path: Path, world: HostGroup, weights_key: str = "model"
) -> None:
    """Write a Lightning checkpoint; every process of the run calls this.

    Args:
        checkpoint: A whole checkpoint. Each rank writes the tensors of its ``state_dict`` that are
            not shape-only, and its ``optimizer_states``; global rank 0 writes the rest.
        path: The path of the folder, the same on every rank; an old checkpoint there is replaced.
        world: The processes. One of them writes a tensor that several have.
        weights_key: The key of the ``state_dict`` in the folder.

    Raises:
        RuntimeError: A rank could not write; all ranks raise it, and ``path`` is unchanged.
    """
    is_first = dist.get_rank() == 0
    with replace_atomically(path, folder=True) if is_first else nullcontext() as folder:
        part: Path = world.broadcast(folder, 0)
        rest = dict(checkpoint)
        with _naming_ranks(f"the checkpoint {path} was not saved", world):
            tensors, writer = _pop_tensors(rest, weights_key), PartWriter(part)
            planner = _EmptyStatePlanner()
            save(tensors, storage_writer=writer, planner=planner, process_group=world.host_group)
        if is_first:
            with (part / META_FILE).open("wb") as file, showing_first_error():
                torch.save(rest, file)


class _EmptyStatePlanner(DefaultSavePlanner):
    """Writes the empty state of an optimizer without any as an entry, which torch leaves out."""

    @override
    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(state_dict, *args, **kwargs)
        for key, entry in state_dict.items():
            if key.startswith("optimizer_") and entry.get("state") == {}:
                self.state_dict[f"{key}.state"] = {}
                self.mappings[f"{key}.state"] = key, "state"


class PartWriter(FileSystemWriter):
    """Writes one rank's part; if a write fails, all ranks get the error."""

    @override
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not Path(self.path).exists():  # torch would make another one on this machine's disk
            raise FileNotFoundError(
                "the folder that global rank 0 has made is not on this machine; save to a file "
                "system that all machines share, or set save_distributed_checkpoint=False"
            )
        return super().prepare_local_plan(plan)

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with showing_first_error():  # errors before the one that is raised are not sent to others
            return super().write_data(plan, planner)


def _pop_tensors(rest: dict[str, Any], weights_key: str) -> dict[str, Any]:
    """Remove from a checkpoint the tensors that each rank writes itself, and return them."""
    model = rest.pop("state_dict").items()
    states = {weights_key: {k: v for k, v in model if not isinstance(v, ShapeOnly)}}
    for index, state in enumerate(rest.pop("optimizer_states", ())):
        states[f"optimizer_{index}"] = state
    # torch writes an empty dict as an entry, although other ranks write entries below it.
    return {key: state for key, state in states.items() if state}


@contextmanager
def _naming_ranks(error_text: str, group: HostGroup) -> Iterator[None]:
    """Raise, on all ranks, one line with the ranks that failed and the reasons."""
    try:
        with reporting_lost_peers(f"lost a rank: {error_text}"):
            yield
    except CheckpointException as error:
        reasons = [
            f"global rank {dist.get_global_rank(group.host_group, rank)}: {cause}"
            for rank, (cause, _) in sorted(error.failures.items())
        ]
        raise RuntimeError(f"{error_text}: {'; '.join(reasons)}") from error


# Reading


def read_checkpoint_folder(
    path: Path, rest: dict[str, Any], weights_only: bool | None, fits: bool
) -> dict[str, Any]:
    """Read a checkpoint in the form that Lightning expects; read tensors when they are used.

    Args:
        path: The path of the folder.
        rest: The content of its ``meta.pt``.
        weights_only: Whether to refuse anything but plain data; None: torch's default.
        fits: Whether the optimizers' states are used too.

    Raises:
        ValueError: The folder's ``.metadata`` is not that of a checkpoint.
    """
    weights = ("model", "state_dict")  # the second in ModelParallelStrategy's folders
    saved = StoredFolder(path, weights_only).load((*weights, "optimizer_") if fits else weights)
    checkpoint = {**rest, "state_dict": saved.pop(next(key for key in weights if key in saved))}
    if saved:
        checkpoint["optimizer_states"] = [
            {"state": {}, **saved[f"optimizer_{n}"]} for n in range(len(saved))
        ]
    return checkpoint


class StoredFolder:
    """The content of a folder.

    Args:
        path: The path of the folder.
        weights_only: Whether to refuse other than plain data; None: torch's default.

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
        """Return the entries whose first key begins with one of ``kinds``."""
        keys: dict[str, tuple[Any, ...]] = self._metadata.planner_data
        flat: dict[str, Any] = {}
        for name, entry in self._metadata.state_dict_metadata.items():
            if str(keys[name][0]).startswith(kinds):
                flat[name] = None
                if isinstance(entry, TensorStorageMetadata):
                    meta = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
                    flat[name] = StoredTensor(meta, partial(self._read_tensor, name, meta))
        others = {name: None for name, value in flat.items() if value is None}
        self._read(others)
        return unflatten_state_dict({**flat, **others}, keys)

    def _read_tensor(self, name: str, meta: Tensor) -> Tensor:
        target = {name: torch.empty_like(meta, device="cpu")}
        self._read(target)
        return target[name]

    def _read(self, flat: dict[str, Any]) -> None:
        """Read into a flat dict on this rank only, since other ranks use other entries."""
        if self._stamp() != self._written:
            raise RuntimeError(f"the checkpoint {self._path} was replaced while it was read")
        # Not torch's load, which warns of each read by a single rank.
        planner = _WeightsOnlyLoadPlanner(self._weights_only)
        planner.set_up_planner(flat, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        [plan] = self._reader.prepare_global_plan(planner.create_global_plan([plan]))
        places = (self._metadata.storage_data[item.storage_index] for item in plan.items)
        names = sorted({str(self._path / place.relative_path) for place in places})
        with naming_damaged(", ".join(names)):
            self._reader.read_data(planner.finish_plan(plan), planner).wait()

    def _stamp(self) -> tuple[int, int]:
        status = os.stat(self._path / _METADATA_FILE)
        return status.st_ino, status.st_mtime_ns


class _WeightsOnlyLoadPlanner(DefaultLoadPlanner):
    """Fills a flat dict; unpickles as ``weights_only`` allows."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    @override
    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        loaded = torch.load(value, weights_only=self._weights_only)
        self.state_dict[read_item.dest_index.fqn] = loaded


class MetadataReader(FileSystemReader):
    """Reads a folder without running code in its ``.metadata``, which is a pickle."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata.

        Raises:
            ValueError: The file holds something else.
        """
        metadata = _unpickle(Path(self.path) / _METADATA_FILE)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id  # as torch's own reader does
        return metadata


def _unpickle(path: Path) -> Metadata:
    with path.open("rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError) as error:
            raise ValueError(f"the checkpoint's {path} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata):
        raise ValueError(f"the checkpoint's {path} has a {type(metadata).__name__}, not a Metadata")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(
                f"it refers to {module}.{name}, which no metadata needs and which might run code; "
                f"load only checkpoints that you trust"
            )
        return super().find_class(module, name)

"""The checkpoint as a folder: each rank writes what it owns, with torch's distributed checkpoint.

The layout is that of Lightning's FSDPStrategy (``model``, ``optimizer_0``, ``meta.pt``), so that
``python -m lightning.pytorch.utilities.consolidate_checkpoint`` makes one file of it, with the
optimizer's state by the names of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from torch.distributed.checkpoint import (  # type: ignore[attr-defined] # exported at run time
    CheckpointException,
    FileSystemWriter,
    SavePlan,
    SavePlanner,
    save,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from lightning_pipeoffload.checkpoints.file import is_remote, replacing, showing_first_error
from lightning_pipeoffload.checkpoints.stored_folder import StoredFolder
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.host_group import HostGroup
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.transport import blaming_peers

META_FILE = "meta.pt"


def is_checkpoint_folder(path: str | Path) -> bool:
    """Whether there is a checkpoint in FSDPStrategy's layout."""
    return (Path(path) / META_FILE).is_file()


def refuse_file_io(io: CheckpointIO) -> NoReturn:
    """Refuse a plugin that writes files, where checkpoints are folders.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"{type(io).__name__} writes files, and with save_distributed_checkpoint=True each rank "
        f"writes its part of a folder by itself; leave one of them out"
    )


def refuse_remote_folder(path: str | Path, storage_options: Any | None) -> None:
    """Refuse a place that is no local folder.

    Raises:
        ValueError: The place is a URL, or options for one are given.
    """
    if storage_options is not None or is_remote(path):
        raise ValueError(
            f"a checkpoint folder is written to a mounted disk, without storage_options; got "
            f"{path} and {storage_options!r}; set save_distributed_checkpoint=False"
        )


def write_checkpoint_folder(checkpoint: dict[str, Any], path: Path, group: PipelineGroup) -> None:
    """Write a Lightning checkpoint; every rank of every replica calls this.

    Args:
        checkpoint: A whole checkpoint. Of its ``state_dict`` each rank writes what is not
            shape-only, of ``optimizer_states`` all that it has; the rest is that of global rank 0.
        path: The path of the folder, the same on every rank; what is there is replaced.
        group: The processes. What several have is written by one of them.

    Raises:
        RuntimeError: A rank could not write; all of them raise it, and what was there stays.
    """
    world = group.world
    with replacing(path, folder=True) if group.reports else nullcontext() as own:
        part: Path = world.broadcast(own, 0)
        rest = dict(checkpoint)
        with _naming_ranks(f"the checkpoint {path} was not saved", world):
            save(_parts(rest), storage_writer=PartWriter(part), process_group=world.host_group)
        if group.reports:
            with (part / META_FILE).open("wb") as file, showing_first_error():
                torch.save(rest, file)


class PartWriter(FileSystemWriter):
    """Writes one rank's part; all ranks get the error that broke its write."""

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with showing_first_error():  # what came before an error does not go to other ranks
            return super().write_data(plan, planner)


def _parts(rest: dict[str, Any]) -> dict[str, Any]:
    """Take what ranks write apart out of a checkpoint."""
    model = rest.pop("state_dict").items()
    states = {"model": {k: v for k, v in model if not isinstance(v, ShapeOnly)}}
    for place, state in enumerate(rest.pop("optimizer_states", ())):
        states[f"optimizer_{place}"] = state
    # An empty dict would be an entry of its own, next to those that other ranks write below it.
    return {key: state for key, state in states.items() if state}


@contextmanager
def _naming_ranks(what: str, group: HostGroup) -> Iterator[None]:
    """Say in one line what failed on which ranks; the same on all of them."""
    try:
        with blaming_peers(f"lost a rank: {what}"):
            yield
    except CheckpointException as error:
        reasons = [
            f"global rank {dist.get_global_rank(group.host_group, rank)}: {cause}"
            for rank, (cause, _) in sorted(error.failures.items())
        ]
        raise RuntimeError(f"{what}: {'; '.join(reasons)}") from error


def read_checkpoint_folder(
    path: Path, rest: dict[str, Any], weights_only: bool | None, fits: bool
) -> dict[str, Any]:
    """Read a checkpoint as Lightning's loops take it; its tensors are read when they are used.

    Args:
        path: The path of the folder.
        rest: What is in its ``meta.pt``.
        weights_only: Whether to refuse what is not plain data; None: as torch does by default.
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

"""Checkpoints of all ranks, written together and read by each; what a fit continues that resumes.

The states of module and optimizers are in ``split_state.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from lightning.fabric.plugins import CheckpointIO

from lightning_pipeoffload.checkpoints.file import AtomicCheckpointIO, path_or_backup
from lightning_pipeoffload.checkpoints.folder import (
    META_FILE,
    is_checkpoint_folder,
    read_checkpoint_folder,
    refuse_incomplete_folder,
    refuse_remote_folder,
    write_checkpoint_folder,
)
from lightning_pipeoffload.checkpoints.saved_values import CheckpointGatherer
from lightning_pipeoffload.checkpoints.shards import join_checkpoint_shards, wrap_shards
from lightning_pipeoffload.runtime import mix_seed, without_garbage_collection
from lightning_pipeoffload.runtime.comm import PipelineGroup

_SEED, _FIRST_BATCH = "pipeoffload_seed", "pipeoffload_first_batch"
_NUM_ENTRIES, _READ = "pipeoffload_num_entries", "pipeoffload_read"
_BY_RANKS = ("state_dict", "optimizer_states")  # entries of which each rank writes its own


class ResumeState(NamedTuple):
    """What a checkpoint has of an entry of the trainer: a fit or an evaluation.

    Attributes:
        seed: The seed of its steps; None before the first entry.
        first_batch: What the first batch has decided for later ones; empty before it.
        num_entries: The number of fits and evaluations of the trainer, this one included.
        read: What the reader of each replica has read, and its generators; empty before a pass.
    """

    seed: int | None = None
    first_batch: Mapping[str, Any] = MappingProxyType({})
    num_entries: int = 0
    read: Sequence[dict[str, Any]] = ()

    def next(self, drawn: int, resumed: ResumeState | None) -> ResumeState:
        """Return what the next entry begins with.

        Args:
            drawn: A seed that all ranks have drawn.
            resumed: What that entry continues; None: it resumes no other.
        """
        if resumed is not None and resumed.seed is not None:
            return ResumeState(resumed.seed, num_entries=resumed.num_entries)
        num_entries = self.num_entries + 1  # a second fit from the same state has other numbers
        return ResumeState(mix_seed(drawn, num_entries), num_entries=num_entries)

    def reader_state(self, replica: int, num_replicas: int) -> dict[str, Any] | None:
        """Return what the reader of a replica had read; the first one's if there were others."""
        return self.read[replica if len(self.read) == num_replicas else 0] if self.read else None

    @classmethod
    def read_from(cls, checkpoint: Mapping[str, Any]) -> ResumeState:
        return cls(
            checkpoint.get(_SEED),
            checkpoint.get(_FIRST_BATCH, {}),
            checkpoint.get(_NUM_ENTRIES, 0),
            checkpoint.get(_READ, ()),
        )

    def write_to(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[_SEED], checkpoint[_NUM_ENTRIES] = self.seed, self.num_entries
        if self.read:
            checkpoint[_READ] = self.read
        if self.first_batch.keys() - {"lists"}:
            checkpoint[_FIRST_BATCH] = copy.deepcopy(self.first_batch)


def write_checkpoint(
    checkpoint: dict[str, Any],
    path: str | Path,
    group: PipelineGroup,
    io: CheckpointIO | None,
    storage_options: Any | None,
) -> None:
    """Write the values of all ranks; all of them call it.

    ``io`` writes one file, from global rank 0; None: a folder, to which each writes what it owns.
    """
    if io is None:
        refuse_remote_folder(path, storage_options)
        _write_folder(checkpoint, Path(group.world.broadcast(path, 0)), group)
        return
    # Another plugin may copy the checkpoint before it writes it.
    one_by_one = type(io) is AtomicCheckpointIO
    checkpoint = join_checkpoint_shards(checkpoint, group)
    with (
        without_garbage_collection(),
        CheckpointGatherer(checkpoint, group).checkpoint_with_values(one_by_one) as whole,
    ):
        if group.global_rank == 0:
            io.save_checkpoint(whole, path, storage_options=storage_options)


def _write_folder(checkpoint: dict[str, Any], path: Path, group: PipelineGroup) -> None:
    by_ranks = {key: checkpoint[key] for key in _BY_RANKS if key in checkpoint}
    rest = {key: value for key, value in checkpoint.items() if key not in by_ranks}
    by_ranks["state_dict"] = wrap_shards(by_ranks["state_dict"])
    rest = join_checkpoint_shards(rest, group)
    with CheckpointGatherer(rest, group).checkpoint_with_values(one_by_one=False) as whole:
        rest = whole
    write_checkpoint_folder({**rest, **by_ranks}, path, group.world)


def read_checkpoint(
    path: str | Path, io: CheckpointIO, weights_only: bool | None, fits: Callable[[], bool]
) -> dict[str, Any]:
    """Read a file or a folder, whose values are read when they are used.

    ``fits`` says of a folder whether the optimizers' states are needed.
    """
    folder = Path(path_or_backup(path))
    if not is_checkpoint_folder(folder):
        refuse_incomplete_folder(folder)
        return io.load_checkpoint(path, weights_only=weights_only)
    rest = io.load_checkpoint(folder / META_FILE, weights_only=weights_only)
    return read_checkpoint_folder(folder, rest, weights_only, fits())

"""What a fit that resumes another one continues, apart from the module and the optimizers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from lightning_pipeoffload.runtime import mix_seed

_SEED, _FIRST_BATCH = "pipeoffload_seed", "pipeoffload_first_batch"
_NUM_ENTRIES, _READ = "pipeoffload_num_entries", "pipeoffload_read"


class Continued(NamedTuple):
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

    def next(self, drawn: int, resumed: Continued | None) -> Continued:
        """Return what the next entry begins with.

        Args:
            drawn: A seed that all ranks have drawn.
            resumed: What that entry continues; None: it resumes no other.
        """
        if resumed is not None and resumed.seed is not None:
            return Continued(resumed.seed, num_entries=resumed.num_entries)
        num_entries = self.num_entries + 1  # a second fit from the same state has other numbers
        return Continued(mix_seed(drawn, num_entries), num_entries=num_entries)

    @classmethod
    def read_from(cls, checkpoint: Mapping[str, Any]) -> Continued:
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

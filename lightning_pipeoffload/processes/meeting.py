"""Where the ranks of a pipeline meet for what all of them do, or learn that one does not come."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time


class Meeting:
    """Places that the ranks of a pipeline come to in the same order.

    Args:
        store: A connection to the run's TCPStore that waits for nothing else.
        global_rank: The global rank of this process.
        global_ranks: The global ranks that come.
        patience: How long one rank waits for the others.
    """

    def __init__(
        self, store: Store, global_rank: int, global_ranks: Sequence[int], patience: timedelta
    ) -> None:
        self._store = store
        self._global_rank = global_rank
        self._global_ranks = global_ranks
        self._patience = patience
        self._count = 0

    def come(self, what: str) -> dict[int, str]:
        """Wait for all ranks.

        Args:
            what: What this rank is about to do.

        Returns:
            What each global rank is about to do; those that have not come are left out.
        """
        self._count += 1
        keys = {rank: self._key(self._count, rank) for rank in self._global_ranks}
        self._store.set(keys[self._global_rank], what)
        try:
            self._store.wait(list(keys.values()), self._patience)
        except dist.DistStoreError:
            keys = {rank: key for rank, key in keys.items() if self._store.check([key])}
        found = {rank: self._store.get(key).decode() for rank, key in keys.items()}
        if self._count > 2:  # of the last one, others may still read
            self._store.delete_key(self._key(self._count - 2, self._global_rank))
        return found

    @property
    def seconds(self) -> float:
        """How long a rank waits."""
        return self._patience.total_seconds()

    @staticmethod
    def _key(count: int, rank: int) -> str:
        return f"meeting/{count}/{rank}"

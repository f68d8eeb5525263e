"""Whether all ranks read as many batches: else one waits for ever for what another does not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

from lightning_pipeoffload.runtime.mesh import RankMesh

_ARRIVED = "arrived/"


class Arrivals:
    """Compares how many batches the ranks have read between the places that all of them pass.

    Such as a validation, or an epoch's end. Nobody waits for it: the thread that looks for failures
    compares.

    Args:
        store: A store that all ranks can read.
        mesh: The processes.
    """

    def __init__(self, store: Store, mesh: RankMesh) -> None:
        self._store = store
        self._mesh = mesh
        self._global_rank = mesh.global_rank
        self._others = [rank for rank in range(mesh.world_size) if rank != mesh.global_rank]
        self._position = 0, 0  # places passed, batches since; one object, as two threads use it

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Count a batch; where it fails because another rank has no more, say that.

        Raises:
            RuntimeError: The batch failed; the message says that another rank has no more.
        """
        place, num_batches = self._position
        self._position = place, num_batches + 1
        try:
            yield
        except RuntimeError as error:  # the other's next batch came in place of this one's, say
            cause = self.look(self._store)
            if cause is not None:
                raise RuntimeError(f"this rank waits for {cause}") from error
            raise

    def arrive(self) -> None:
        """Pass a place, and let the others know after how many batches."""
        place, num_batches = self._position
        self._store.set(f"{_ARRIVED}{place}/{self._global_rank}", str(num_batches))
        self._position = place + 1, 0

    def look(self, store: Store) -> str | None:
        """Name another rank that is done with fewer batches, if one is.

        Args:
            store: The same store, maybe by a connection of another thread.
        """
        place, num_batches = self._position
        for rank in self._others if num_batches else ():
            key = f"{_ARRIVED}{place}/{rank}"
            theirs = int(store.get(key)) if store.check([key]) else num_batches
            if theirs < num_batches:
                return self._explain(rank, theirs)
        return None

    def _explain(self, rank: int, num_batches: int) -> str:
        other, own = self._mesh.replica_of(rank), self._mesh.replica
        if other != own:
            return (
                f"replica {other}, whose data has ended after {num_batches} batches where replica "
                f"{own} has more; give every replica as many: by Lightning's sampler, or with "
                f"limit_train_batches where an IterableDataset shares its data out"
            )
        return (
            f"global rank {rank}, whose data has ended after {num_batches} batches where global "
            f"rank {self._global_rank} has more; the ranks of a pipeline must read the same "
            f"batches: give each the same data, and do not share it out"
        )

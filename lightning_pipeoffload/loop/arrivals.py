"""Whether all ranks read as many batches: else one waits for ever for what another does not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import Store  # type: ignore[attr-defined] # exported at run time

_ARRIVED = "arrived/"


class Arrivals:
    """Compares how many batches the ranks have read between the places that all of them pass.

    Such as a validation, or an epoch's end. Nobody waits for it: the thread that looks for failures
    compares.

    Args:
        store: A store that all ranks can read.
        global_rank: The global rank of this process.
        world_size: The world size of the run.
    """

    def __init__(self, store: Store, global_rank: int, world_size: int) -> None:
        self._store = store
        self._global_rank = global_rank
        self._others = [rank for rank in range(world_size) if rank != global_rank]
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
                return (
                    f"global rank {rank}, whose data has ended after {theirs} batches where global "
                    f"rank {self._global_rank} has more; the ranks of a pipeline must read the "
                    f"same batches: give each the same data, and do not share it out"
                )
        return None

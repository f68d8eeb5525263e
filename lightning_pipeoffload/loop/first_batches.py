"""Whether replicas read different batches, where Lightning does not see to it.

Its sampler shares out what has an index. A stream, or data with a sampler of the user's own, each
replica reads for itself, and all may read the same: nothing would fail, and nothing be gained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, islice
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from lightning_pipeoffload.runtime.microbatch import start_checksum
from lightning_pipeoffload.runtime.replicas import Replicas

_NUM_BATCHES = 2  # one alone may be like another's where all are alike


class FirstBatches:
    """Compares the first batches of some loaders over the replicas, when they have been read.

    Args:
        replicas: The counterparts of this rank.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._names: list[str] = []
        self._checksums: list[list[int]] = []
        self._num_steps = 0

    def noting(self, loader: Any) -> Callable[[Iterator[Any]], Iterator[Any]]:
        """Return a function through which each pass over a loader goes."""
        if self._replicas.num == 1 or _is_shared_out(loader):
            return iter
        self._names.append(type(getattr(loader, "dataset", loader)).__name__)
        checksums: list[int] = []
        self._checksums.append(checksums)

        def note(batches: Iterator[Any]) -> Iterator[Any]:
            for batch in islice(batches, _NUM_BATCHES - len(checksums)):
                checksums.append(start_checksum(batch)())
                yield batch
            yield from batches

        return note

    def start_step(self) -> None:
        """Compare, where this step is of the last of the first batches; else nobody waits.

        Raises:
            ValueError: Two replicas read the same.
        """
        self._num_steps += 1
        if self._num_steps != _NUM_BATCHES or not self._names:
            return
        found = self._replicas.gather(self._checksums)
        for name, by_replica in zip(self._names, zip(*found, strict=True), strict=True):
            for (one, mine), (other, theirs) in combinations(enumerate(by_replica), 2):
                if mine == theirs and len({*mine}) == _NUM_BATCHES:
                    raise ValueError(_explain(name, one, other))


def _explain(name: str, one: int, other: int) -> str:
    return (
        f"replicas {one} and {other} read the same batches of {name}, which nothing shares out "
        f"among them; let it, or a sampler of your own, give each replica its part, by "
        f"lightning_pipeoffload.data_parallel_rank() and data_parallel_size(); for data with "
        f"indices Lightning's sampler does it, without use_distributed_sampler=False"
    )


def _is_shared_out(loader: Any) -> bool:
    if not isinstance(loader, DataLoader):
        return False
    samplers = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers)

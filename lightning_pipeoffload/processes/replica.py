"""The replica of a process, by which data are divided."""

from __future__ import annotations

import os

# In the environment, which a loader's workers, forked or spawned, inherit.
_RANK, _SIZE = "PIPEOFFLOAD_DATA_PARALLEL_RANK", "PIPEOFFLOAD_DATA_PARALLEL_SIZE"


def data_parallel_rank() -> int:
    """Return the replica of this process; 0 without a pipeline.

    All ranks of a pipeline, which must read the same batches, and the workers of their loaders have
    the same replica.
    """
    return int(os.environ.get(_RANK, 0))


def data_parallel_size() -> int:
    """Return the number of replicas that divide the data; 1 without a pipeline."""
    return int(os.environ.get(_SIZE, 1))


def set_replica(replica: int, num_replicas: int) -> None:
    """Set the replica of this process and of those that it starts."""
    os.environ[_RANK], os.environ[_SIZE] = str(replica), str(num_replicas)


def forget_replica() -> None:
    """Undo :func:`set_replica`."""
    for name in (_RANK, _SIZE):
        os.environ.pop(name, None)

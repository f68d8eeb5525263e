"""The replica of a process, by which data are divided."""

from __future__ import annotations

import os

# In the environment, which a loader's workers, forked or spawned, inherit.
_RANK, _SIZE = "PIPEOFFLOAD_DATA_PARALLEL_RANK", "PIPEOFFLOAD_DATA_PARALLEL_SIZE"
_READS = "PIPEOFFLOAD_READS_DATA"


def data_parallel_rank() -> int:
    """Return the replica of this process; 0 without a pipeline.

    All ranks of a pipeline and the workers of their loaders have the same replica.
    """
    return int(os.environ.get(_RANK, 0))


def data_parallel_size() -> int:
    """Return the number of replicas that divide the data; 1 without a pipeline."""
    return int(os.environ.get(_SIZE, 1))


def reads_data() -> bool:
    """Return whether loaders are read in this process; True without a pipeline.

    One process of each replica reads, and the others get its batches. So a dataset that takes much
    memory need be loaded there only: elsewhere another one will do, in as many loaders.
    """
    return os.environ.get(_READS, "1") == "1"


def set_replica(replica: int, num_replicas: int, reads: bool = True) -> None:
    """Set the replica of this process and of those that it starts, and whether it reads data."""
    os.environ[_RANK], os.environ[_SIZE] = str(replica), str(num_replicas)
    os.environ[_READS] = str(int(reads))


def forget_replica() -> None:
    """Undo :func:`set_replica`."""
    for name in (_RANK, _SIZE, _READS):
        os.environ.pop(name, None)

"""Which replica a process is of, for data that share themselves out.

A loader's workers, forked or spawned, are told as they are told everything: by the environment.
"""

from __future__ import annotations

import os

_RANK, _SIZE = "PIPEOFFLOAD_DATA_PARALLEL_RANK", "PIPEOFFLOAD_DATA_PARALLEL_SIZE"


def data_parallel_rank() -> int:
    """Return the replica that this process is of; 0 where no pipeline runs.

    All ranks of a pipeline have the same, which must read the same batches; so have the workers of
    their loaders.
    """
    return int(os.environ.get(_RANK, 0))


def data_parallel_size() -> int:
    """Return the number of replicas, which share out the data; 1 where no pipeline runs."""
    return int(os.environ.get(_SIZE, 1))


def tell_replica(replica: int, num_replicas: int) -> None:
    """Let this process, and those that it starts, know its replica."""
    os.environ[_RANK], os.environ[_SIZE] = str(replica), str(num_replicas)


def forget_replica() -> None:
    """Let this process be of no replica."""
    for name in (_RANK, _SIZE):
        os.environ.pop(name, None)

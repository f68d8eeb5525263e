"""Runs a module without values as the first of several tensor ranks, in a single process.

Layers are distributed and called as on the first of the ranks; what collectives would send has no
values either, so that the other ranks need not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_pipeoffload.runtime.comm import MESH_DIMENSIONS, clear_dtensor_caches
from lightning_pipeoffload.runtime.tensor_parallel.collectives import synchronous_collectives

_CPU = torch.device("cpu")


@contextmanager
def fake_process_group(num_tensor_ranks: int) -> Iterator[None]:
    """Within the context, have a default process group of ``num_tensor_ranks``, this one rank 0.

    No other process exists, and nothing is sent. No group is made for one tensor rank.
    """
    if num_tensor_ranks == 1:
        yield
        return
    # Private: registers the backend, and the only store that it takes.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - for tests

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_tensor_ranks)
    try:
        with synchronous_collectives(_CPU):
            yield
    finally:
        dist.destroy_process_group()


def fake_tensor_mesh(num_tensor_ranks: int) -> DeviceMesh:
    """Return the mesh that ``configure_model`` gets, of one pipeline rank and one replica.

    ``num_tensor_ranks`` may be smaller than the process group, so one group serves several sizes.
    """
    clear_dtensor_caches()
    ranks = torch.arange(num_tensor_ranks).view(1, 1, 1, num_tensor_ranks)
    return DeviceMesh(_CPU.type, ranks, mesh_dim_names=MESH_DIMENSIONS)

"""Collectives over gloo for Python objects and host tensors, within a pipeline or a whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime.comm.mesh import RankMesh
from lightning_pipeoffload.runtime.comm.transport import reporting_lost_peers, wait_for
from lightning_pipeoffload.runtime.device import unprofiled

NO_LIMIT = timedelta(days=7)
_FEW_BYTES = 4096  # that are sent with their number


class HostGroup:
    """Collectives over a gloo process group.

    Attributes:
        host_group: The gloo group; replaced when the processes reconnect.
        side_group: A second gloo group, whose collectives overlap with those of a step.
    """

    def __init__(self, group: Any, side_group: Any = None) -> None:
        self.host_group = group
        self.side_group = side_group

    @property
    def num_processes(self) -> int:
        return dist.get_world_size(self.host_group)

    def barrier(self) -> None:
        with reporting_lost_peers("lost a rank in a barrier"):
            dist.barrier(group=self.host_group)

    def broadcast(self, obj: Any, src: int) -> Any:
        """Return the object of global rank ``src``."""
        if self.num_processes == 1:  # torch would pickle it all the same
            return obj
        objects = [obj]
        with reporting_lost_peers("lost a rank in a broadcast"):
            dist.broadcast_object_list(objects, src, group=self.host_group)
        return objects[0]

    def broadcast_message(self, data: bytes, src: int) -> bytes:
        """Return the bytes of global rank ``src``, in one broadcast if they are few."""
        with reporting_lost_peers("lost a rank in a broadcast"):
            buffer = torch.zeros(_FEW_BYTES, dtype=torch.uint8)
            if dist.get_rank() == src:
                whole = torch.frombuffer(
                    bytearray(len(data).to_bytes(8, "big") + data), dtype=torch.uint8
                )
                buffer[: len(whole)] = whole[:_FEW_BYTES]
            dist.broadcast(buffer, src, group=self.host_group)
            size = int.from_bytes(bytes(buffer[:8].tolist()), "big")
            if size + 8 <= _FEW_BYTES:
                return data or buffer.numpy()[8 : size + 8].tobytes()
            rest = torch.empty(size + 8 - _FEW_BYTES, dtype=torch.uint8)
            if dist.get_rank() == src:
                rest.copy_(whole[_FEW_BYTES:])
            dist.broadcast(rest, src, group=self.host_group)
            return data or (buffer.numpy().tobytes() + rest.numpy().tobytes())[8:]

    def gather(self, obj: Any) -> list[Any]:
        """Return the objects of all processes, in the order of their global ranks."""
        if self.num_processes == 1:
            return [obj]
        objects: list[Any] = [None] * self.num_processes
        with reporting_lost_peers("lost a rank while gathering"):
            dist.all_gather_object(objects, obj, group=self.host_group)
        return objects

    def agree(self, decision: bool, unanimous: bool) -> bool:
        """Return whether all processes pass True if ``unanimous``, else whether any does."""
        votes = self.gather(decision)
        return all(votes) if unanimous else any(votes)

    def agree_on_any(self, decision: bool, patience: timedelta | None = None) -> bool:
        """Return whether any process passes True; cheaper than :meth:`agree`.

        Args:
            decision: What this process passes.
            patience: How long it waits for the others; None: as long as in other collectives.

        Raises:
            RuntimeError: Another process has not come within ``patience``.
        """
        if self.num_processes == 1:
            return decision
        votes = torch.tensor([int(decision)])
        with reporting_lost_peers("lost a rank while deciding together"):
            work = dist.all_reduce(votes, dist.ReduceOp.MAX, self.host_group, async_op=True)
            assert work is not None
            work.wait(*([] if patience is None else [patience]))
        return bool(votes)

    def start_number_broadcast(self, number: int, src: int) -> Callable[[], Tensor]:
        """Start a broadcast from global rank ``src``; return a function that waits for it."""
        message = torch.tensor([int(number)])
        # The group's own method: that of torch.distributed takes twice as long.
        with unprofiled():
            work = self.side_group.broadcast(message, dist.get_group_rank(self.side_group, src))
        return partial(wait_for, work, "lost a rank while deciding together", message)


class World(HostGroup):
    """All processes of a run, of every replica."""

    def __init__(self, mesh: RankMesh) -> None:
        groups = [mesh.make_world_group(use, backend="gloo") for use in ("world", "world side")]
        super().__init__(*groups)
        self._mesh = mesh

    @contextmanager
    def untimed_barrier_on_exit(self) -> Iterator[None]:
        """Wait for all processes on leaving the context, without the timeout of the run."""
        if self.num_processes == 1:
            yield
            return
        group = self._mesh.make_world_group("no limit", backend="gloo", timeout=NO_LIMIT)
        yield
        with reporting_lost_peers("lost a rank while it compiled"):
            dist.barrier(group=group)

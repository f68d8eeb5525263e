"""One rank's counterparts in all replicas of its pipeline: the same stages, on other data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime.mesh import RankMesh
from lightning_pipeoffload.runtime.message_links import as_bytes
from lightning_pipeoffload.runtime.transport import blaming_peers

_Value = TypeVar("_Value")


class Replicas:
    """What counterparts do together, as one of them sees it; nothing where it has none.

    Args:
        mesh: The processes.

    Attributes:
        num: How many replicas there are.
        own: Which of them this process is of.
        group: Their process group, for what hooks and steps ask for; None where there is one.
    """

    group: Any = None

    def __init__(self, mesh: RankMesh) -> None:
        self.num = mesh.num_replicas
        self.own = mesh.replica
        self._ranks = mesh.counterparts
        self._mesh = mesh

    def connect(self) -> None:
        """Make the groups, on all ranks; again: forget what was under way."""
        if self.num > 1:
            self.group = self._mesh.make_data_group()
            # Sums of gradients run beside a step, so their order is their own.
            self._sums = self._mesh.make_data_group()
            self._host = self._mesh.make_data_group(backend="gloo")

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Start to sum a tensor over the replicas, in place; return a function that waits for it.

        On an accelerator its stream waits, not the host.
        """
        work = dist.all_reduce(tensor, group=self._sums, async_op=True)
        return _waiting(work, "summing gradients")

    def start_copy(self, tensor: Tensor, source: int) -> Callable[[], None]:
        """Start to copy what a contiguous tensor is on one replica to all of them, in place.

        Args:
            tensor: The tensor.
            source: That replica.

        Returns:
            A function that waits for it; on an accelerator its stream waits, not the host.
        """
        data = as_bytes(tensor)
        work = dist.broadcast(data, self._ranks[source], group=self.group, async_op=True)
        return _waiting(work, "weights were sent")

    def start_union(self, flags: Tensor) -> Callable[[], None]:
        """Start to set, in place, those of some flags on the host that any replica has set."""
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._host, async_op=True)
        return _waiting(work, "summing gradients")

    def gather(self, obj: Any) -> list[Any]:
        """Return the objects of all replicas, in their order."""
        if self.num == 1:
            return [obj]
        found: list[Any] = [None] * self.num
        with blaming_peers("lost a replica while gathering"):
            dist.all_gather_object(found, obj, group=self._host)
        return found

    def first(self, obj: _Value) -> _Value:
        """Return the object that replica 0 has."""
        if self.num == 1:
            return obj
        box = [obj]
        with blaming_peers("lost a replica in a broadcast"):
            dist.broadcast_object_list(box, self._ranks[0], group=self._host)
        return box[0]

    def send(self, tensor: Tensor, replica: int) -> None:
        """Send a tensor on the host to another replica, which waits for it."""
        data = as_bytes(tensor.contiguous())
        dist.send(data, self._ranks[replica], group=self._host)

    def receive(self, room: Tensor, replica: int) -> None:
        """Fill a contiguous tensor on the host with what another replica sends."""
        dist.recv(as_bytes(room), self._ranks[replica], group=self._host)

    @torch.no_grad()
    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors have the values that they have on replica 0, where there are others."""
        for tensor in tensors if self.num > 1 else ():
            data = tensor.detach().clone(memory_format=torch.contiguous_format)
            with blaming_peers("lost a replica while weights were sent"):
                dist.broadcast(as_bytes(data), self._ranks[0], group=self.group)
            tensor.detach().copy_(data)


def _waiting(work: Any, what: str) -> Callable[[], None]:
    def wait() -> None:
        with blaming_peers(f"lost a replica while {what}"):
            work.wait()

    return wait

"""One rank's counterparts in all replicas of its pipeline: the same stages, on other data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime.buckets import Bundle, in_buckets
from lightning_pipeoffload.runtime.host_group import HostGroup
from lightning_pipeoffload.runtime.mesh import RankMesh
from lightning_pipeoffload.runtime.pending_parameters import PendingParameters
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.transport import as_bytes, blaming_peers

_Value = TypeVar("_Value")


class Replicas:
    """What counterparts do together, as one of them sees it; nothing where it has none.

    Args:
        mesh: The processes.

    Attributes:
        num: How many replicas there are.
        own: Which of them this process is of.
        group: Their process group, for what hooks and steps ask for; None where there is one.
        counterparts: Their global ranks, in the order of the replicas.
        host: The same processes, over gloo; where there are others.
        in_probe: A function that says whether a step is only looked at, by this rank for itself.
        pending: The weights that they are sending each other.
    """

    group: Any = None

    def __init__(self, mesh: RankMesh) -> None:
        self.num = mesh.num_replicas
        self.own = mesh.replica
        self.in_probe: Callable[[], bool] = lambda: False
        self.pending = PendingParameters()
        self.counterparts = mesh.counterparts
        self._mesh = mesh

    def connect(self) -> None:
        """Make the groups, on all ranks; again: forget what was under way."""
        if self.num > 1:
            self.group = self._mesh.device_data_group("hooks")
            # Sums of gradients run beside a step, so their order is their own.
            self._sums = self._mesh.device_data_group("sums")
            # So do copies: of a step that is repeated one rank may know sooner than another.
            self._copies = self._mesh.device_data_group("copies")
            self.host = HostGroup(self._mesh.make_data_group(backend="gloo"))

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
        work = dist.broadcast(data, self.counterparts[source], group=self._copies, async_op=True)
        return _waiting(work, "weights were sent")

    def start_union(self, flags: Tensor) -> Callable[[], None]:
        """Start to set, in place, those of some flags on the host that any replica has set."""
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.host.host_group, async_op=True)
        return _waiting(work, "summing gradients")

    def gather(self, obj: Any) -> list[Any]:
        """Return the objects of all replicas, in their order."""
        return [obj] if self.num == 1 else self.host.gather(obj)

    def gather_tensor(self, tensor: Tensor, differentiable: bool) -> Tensor:
        """Stack the tensors of all replicas, in their order.

        What has no value stands for what has none either, and so does what a probe has: replicas
        look at steps when each of them has to.

        Args:
            tensor: This rank's; of the same shape on each replica.
            differentiable: Whether gradients go back to the replica that each part is of.
        """
        tensor = tensor if differentiable else tensor.detach()
        if self.is_alone_with(tensor):
            return torch.stack([tensor] * self.num)
        gathered: Tensor = _GatheredTensor.apply(tensor, self.group, self.own)
        return gathered

    def is_alone_with(self, tensor: Tensor) -> bool:
        """Whether the other replicas do not come to where a tensor is."""
        return isinstance(tensor, ShapeOnly) or self.in_probe()

    def first(self, obj: _Value) -> _Value:
        """Return the object that replica 0 has."""
        if self.num == 1:
            return obj
        found: _Value = self.host.broadcast(obj, self.counterparts[0])
        return found

    @torch.no_grad()
    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors have the values that they have on replica 0, where there are others."""
        numbered = dict(enumerate(tensor.detach() for tensor in tensors))
        for numbers in in_buckets(numbered) if self.num > 1 else ():
            bundle = Bundle([numbered[number] for number in numbers])
            self.start_copy(bundle.flat, 0)()
            bundle.unpack()

    @torch.no_grad()
    def copy_first_together(self, tensors: Iterable[Tensor]) -> None:
        """Let tensors, which are small, have their values on replica 0, in one message."""
        aligned = sorted(tensors, key=lambda tensor: -tensor.itemsize)
        data = torch.cat([as_bytes(tensor.contiguous()) for tensor in aligned])
        with blaming_peers("lost a replica while buffers were sent"):
            dist.broadcast(data, self.counterparts[0], group=self.group)
        for tensor, part in zip(aligned, data.split([t.nbytes for t in aligned]), strict=True):
            if self.own:
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


class _GatheredTensor(torch.autograd.Function):
    """Tensors of all replicas; torch's own takes the ranks of a group for global ones."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, own: int) -> Tensor:
        ctx.group, ctx.own = group, own
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format)]
        parts += [torch.empty_like(parts[0]) for _ in range(dist.get_world_size(group) - 1)]
        with blaming_peers("lost a replica in all_gather"):
            dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        with blaming_peers("lost a replica in the backward of all_gather"):
            dist.all_reduce(total, group=ctx.group)
        return total[ctx.own], None, None


def _waiting(work: Any, what: str) -> Callable[[], None]:
    def wait() -> None:
        with blaming_peers(f"lost a replica while {what}"):
            work.wait()

    return wait

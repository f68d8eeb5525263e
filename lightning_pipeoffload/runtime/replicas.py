"""One rank's counterparts in all replicas of its pipeline: the same stages, on other data.

Their tensors travel in buckets: small ones in one message, large ones from their own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime.host_group import HostGroup
from lightning_pipeoffload.runtime.mesh import RankMesh
from lightning_pipeoffload.runtime.pending_parameters import PendingParameters
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.transport import as_bytes, blaming_peers

_MOST_BYTES = 25 << 20
_ALONE = 1 << 20  # a tensor of so many bytes is not copied into a bucket

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Replicas:
    """The collectives of counterparts; without effect where there is one replica.

    Attributes:
        num: The number of replicas.
        own: The replica of this process.
        group: Their process group, for hooks and steps; None where there is one replica.
        counterparts: Their global ranks, in the order of the replicas.
        host: The same processes, over gloo; only where there is more than one replica.
        in_trace: Returns whether this rank traces a step, which the other replicas may not run.
        pending: The parameters that they are sending each other.
    """

    group: Any = None

    def __init__(self, mesh: RankMesh) -> None:
        self.num = mesh.num_replicas
        self.own = mesh.replica
        self.in_trace: Callable[[], bool] = lambda: False
        self.pending = PendingParameters()
        self.counterparts = mesh.counterparts
        self._mesh = mesh

    def connect(self) -> None:
        """Make the groups, on all ranks."""
        if self.num > 1:
            self.group = self._mesh.device_data_group("hooks")
            # Sums of gradients run beside a step, so their order is their own.
            self._sums = self._mesh.device_data_group("sums")
            # So do copies: one rank may know earlier than another that a step is repeated.
            self._copies = self._mesh.device_data_group("copies")
            self.host = HostGroup(self._mesh.make_data_group(backend="gloo"))

    # Each start_ function returns one that waits; on an accelerator its stream waits, not the host

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Start to sum a tensor over the replicas, in place."""
        work = dist.all_reduce(tensor, group=self._sums, async_op=True)
        return _waiting(work, "summing gradients")

    def start_copy(self, tensor: Tensor, source: int) -> Callable[[], None]:
        """Start to copy a contiguous tensor of replica ``source`` to all of them, in place."""
        data = as_bytes(tensor)
        work = dist.broadcast(data, self.counterparts[source], group=self._copies, async_op=True)
        return _waiting(work, "weights were sent")

    def start_union(self, flags: Tensor) -> Callable[[], None]:
        """Start to set, in place, the flags on the host that any replica has set."""
        work = dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.host.host_group, async_op=True)
        return _waiting(work, "summing gradients")

    def gather(self, obj: Any) -> list[Any]:
        """Return the objects of all replicas, in their order."""
        return [obj] if self.num == 1 else self.host.gather(obj)

    def first(self, obj: _Value) -> _Value:
        """Return the object of replica 0."""
        if self.num == 1:
            return obj
        found: _Value = self.host.broadcast(obj, self.counterparts[0])
        return found

    def gather_tensor(self, tensor: Tensor, differentiable: bool) -> Tensor:
        """Stack the tensors of all replicas, which have one shape, in their order.

        A tensor without a value, or of a trace, stands for those of the other replicas, which may
        not run the same code now. Gradients go back to each part's replica if ``differentiable``.
        """
        tensor = tensor if differentiable else tensor.detach()
        if self.is_alone_with(tensor):
            return torch.stack([tensor] * self.num)
        gathered: Tensor = _GatheredTensor.apply(tensor, self.group, self.own)
        return gathered

    def is_alone_with(self, tensor: Tensor) -> bool:
        """Whether the other replicas may not run the code that has this tensor."""
        return isinstance(tensor, ShapeOnly) or self.in_trace()

    @torch.no_grad()
    def copy_first(self, tensors: Iterable[Tensor]) -> None:
        """Copy replica 0's values of tensors to all replicas."""
        numbered = dict(enumerate(tensor.detach() for tensor in tensors))
        for numbers in in_buckets(numbered) if self.num > 1 else ():
            bundle = Bundle([numbered[number] for number in numbers])
            self.start_copy(bundle.flat, 0)()
            bundle.unpack()

    @torch.no_grad()
    def copy_first_together(self, tensors: Iterable[Tensor]) -> None:
        """Copy replica 0's values of small tensors, of any dtypes, in one message."""
        aligned = sorted(tensors, key=lambda tensor: -tensor.itemsize)
        data = torch.cat([as_bytes(tensor.contiguous()) for tensor in aligned])
        with blaming_peers("lost a replica while buffers were sent"):
            dist.broadcast(data, self.counterparts[0], group=self.group)
        for tensor, part in zip(aligned, data.split([t.nbytes for t in aligned]), strict=True):
            if self.own:
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


class _GatheredTensor(torch.autograd.Function):
    """Tensors of all replicas; torch's own function takes the ranks of a group for global ones."""

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


class Bundle:
    """Tensors of one dtype that travel as ``flat``, a copy; a contiguous one alone is no copy."""

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._is_copy = len(tensors) > 1 or not tensors[0].is_contiguous()
        parts = [tensor.reshape(-1) for tensor in tensors]
        self.flat = torch.cat(parts) if self._is_copy else tensors[0].view(-1)

    @torch.no_grad()
    def unpack(self) -> None:
        """Copy the values of ``flat`` back into the tensors."""
        if self._is_copy:
            parts = self.flat.split([tensor.numel() for tensor in self._tensors])
            for tensor, part in zip(self._tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))


def in_buckets(tensors: Mapping[_Key, Tensor]) -> Iterator[list[_Key]]:
    """Group tensors, in their order, into buckets of one dtype; a large one has its own."""
    bucket: list[_Key] = []
    num_bytes = 0
    for key, tensor in tensors.items():
        is_alone = tensor.nbytes >= _ALONE
        fits = bucket and tensors[bucket[0]].dtype == tensor.dtype
        if bucket and (is_alone or not fits or num_bytes + tensor.nbytes > _MOST_BYTES):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(key)
        num_bytes += tensor.nbytes
        if is_alone:
            yield bucket
            bucket, num_bytes = [], 0
    if bucket:
        yield bucket


def share_out(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Assign each size to the owner with the smallest load, the largest size first.

    Args:
        sizes: Bytes, in an order that is the same on all processes.
        loads: The bytes that each owner has already; is added to.

    Returns:
        The owner of each size.
    """
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners

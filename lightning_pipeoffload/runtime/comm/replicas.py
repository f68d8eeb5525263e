"""Collectives between one rank's counterparts: the ranks of all replicas with the same stages.

Tensors are sent in buckets: small tensors share a message, large ones are sent without a copy.
Parameters are sent after a step, while the next one begins. Their first use waits for them: the
first F of a rank, once its message has arrived, and between batches any torch function that gets
one of them as an argument. A later rank loses no time while its first F has no input yet::

    rank 0   step [parameters]  F 0      F 1
    rank 1   step [parameters     ]      F 0      F 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,  # private, with these: a mode begins and ends on top of all others
    _pop_mode,
    _push_mode,
)
from typing_extensions import override

from lightning_pipeoffload.runtime import tensors_in
from lightning_pipeoffload.runtime.comm.host_group import HostGroup
from lightning_pipeoffload.runtime.comm.mesh import RankMesh
from lightning_pipeoffload.runtime.comm.sums_to_owners import SUMMING, SumsToOwners
from lightning_pipeoffload.runtime.comm.transport import as_bytes, reporting_lost_peers, wait_for
from lightning_pipeoffload.runtime.cut import SplitModule
from lightning_pipeoffload.runtime.device import unprofiled
from lightning_pipeoffload.runtime.shapes import ShapeOnly

_NO_MEMORY = 0


class PendingParameters:
    """The broadcasts of parameters that this rank has started and not yet waited for.

    Args:
        may_wait: See :meth:`allow_deferral`.
    """

    def __init__(self, may_wait: bool = False) -> None:
        self._may_wait = may_wait
        self._ends: list[Callable[[], None]] = []
        self._memory: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._ends)

    def defer_or_wait(self, end: Callable[[], None], parameters: Iterable[Tensor]) -> None:
        """Defer ``end``, which waits for a broadcast and stores its values, if that is allowed.

        Args:
            end: Called before any of the parameters is read or written.
            parameters: The parameters that the broadcast writes.
        """
        self._ends.append(end)
        self._memory.update(map(_address_of, parameters))
        self._memory.discard(_NO_MEMORY)
        if not self._may_wait:
            self.wait()

    def allow_deferral(self, may_wait: bool) -> None:
        """Set whether functions passed to :meth:`defer_or_wait` may be deferred.

        They may where nothing between steps reads parameters, or where a
        :class:`PendingParametersMode` detects it.
        """
        self._may_wait = may_wait

    def wait(self) -> None:
        """Wait for all broadcasts."""
        while self._ends:
            self._ends.pop(0)()
        self._memory.clear()

    def forget(self) -> None:
        """Discard all broadcasts without waiting, after an error."""
        self._ends.clear()
        self._memory.clear()
        self._may_wait = False

    def is_any_in(self, values: Any) -> bool:
        """Whether the arguments of a call contain a pending parameter or a view of one."""
        return any(_address_of(tensor) in self._memory for tensor in tensors_in(values))


class PendingParametersMode(TorchFunctionMode):
    """Waits for pending parameters before a torch function gets one of them as an argument.

    It may start and stop inside the user's contexts, which may be modes too, so it is inserted
    below all active modes.
    """

    def __init__(self, *pending: PendingParameters) -> None:
        super().__init__()
        self._pending = pending

    def start(self) -> None:
        above = _pop_modes()
        self.__enter__()
        for mode in above:
            _push_mode(mode)

    def stop(self) -> None:
        for mode in _pop_modes():
            if mode is not self:
                _push_mode(mode)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The tensor of an attribute (.data) shares the memory, so that its use is noticed later.
        is_attribute = getattr(func, "__name__", "") == "__get__"
        for pending in self._pending if not is_attribute else ():
            if pending and pending.is_any_in((args, kwargs)):
                pending.wait()
        return func(*args, **(kwargs or {}))


def _pop_modes() -> list[TorchFunctionMode]:
    """Remove all active modes and return them, the lowest first."""
    modes: list[TorchFunctionMode] = []
    while _get_current_function_mode() is not None:
        modes.insert(0, _pop_mode())
    return modes


def _address_of(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or one without memory
        return _NO_MEMORY


_MOST_BYTES = 25 << 20
_ALONE = 1 << 20  # a tensor of so many bytes is not copied into a bucket

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Replicas:
    """Collectives over the replicas, between counterparts of one rank; no-ops with one replica.

    Attributes:
        num: The number of replicas.
        replica: The replica of this process.
        group: The counterparts' process group, for hooks and steps; None with one replica.
        counterparts: The counterparts' global ranks, in the order of the replicas.
        host: The same processes over gloo; only with more than one replica.
        pending: The parameters that replicas are sending each other.
    """

    group: Any = None

    def __init__(self, mesh: RankMesh) -> None:
        self.num = mesh.num_replicas
        self.replica = mesh.replica
        self._is_tracing = False
        self.pending = PendingParameters()
        self.counterparts = mesh.counterparts
        self._mesh = mesh

    def connect(self) -> None:
        """Make the groups, on all ranks."""
        if self.num > 1:
            self.group = self._mesh.make_device_data_group("hooks")
            # A separate group: sums of gradients overlap with a step's collectives.
            self._sums = self._mesh.make_device_data_group("sums")
            # Another one for copies: one rank may repeat a step earlier than another.
            self._copies = self._mesh.make_device_data_group("copies")
            self.host = HostGroup(self._mesh.make_data_group("host", backend="gloo"))

    # Each start_ method returns a function that waits; on an accelerator the stream waits

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Start to sum a tensor over the replicas, in place."""
        with unprofiled():
            work = dist.all_reduce(tensor, group=self._sums, async_op=True)
        return partial(wait_for, work, SUMMING)

    def sums_to_owners(self) -> SumsToOwners:
        """Return an object that sums each gradient of a step on one replica."""
        return SumsToOwners(self._sums, self.replica, self.counterparts)

    def start_broadcast(self, tensor: Tensor, source: int) -> Callable[[], None]:
        """Start to copy a contiguous tensor of replica ``source`` to all of them, in place."""
        data = as_bytes(tensor)
        target = self.counterparts[source]
        with unprofiled():
            work = dist.broadcast(data, target, group=self._copies, async_op=True)
        return partial(wait_for, work, "lost a replica while weights were sent")

    def start_logical_or(self, flags: Tensor) -> Callable[[], None]:
        """Start to compute the logical or of ``flags`` over the replicas, in place on the host."""
        group, operation = self.host.host_group, dist.ReduceOp.MAX
        with unprofiled():
            work = dist.all_reduce(flags, operation, group=group, async_op=True)
        return partial(wait_for, work, SUMMING)

    def gather(self, obj: Any) -> list[Any]:
        """Return the objects of all replicas, in their order."""
        return [obj] if self.num == 1 else self.host.gather(obj)

    def broadcast_object(self, obj: _Value) -> _Value:
        """Return the object of replica 0."""
        if self.num == 1:
            return obj
        of_first: _Value = self.host.broadcast(obj, self.counterparts[0])
        return of_first

    def gather_tensor(self, tensor: Tensor, differentiable: bool) -> Tensor:
        """Stack the tensors of all replicas, which have the same shape.

        In a trace, and for a tensor without a value, the result repeats ``tensor``: the other
        replicas possibly do not run this code. With ``differentiable``, each replica gets the
        gradient of its tensor.
        """
        tensor = tensor if differentiable else tensor.detach()
        if self.is_local_only(tensor):
            return torch.stack([tensor] * self.num)
        gathered: Tensor = _AllGather.apply(tensor, self.group, self.replica)
        return gathered

    @contextmanager
    def local_only(self) -> Iterator[None]:
        """Send nothing within the context, a trace that other replicas possibly do not run."""
        self._is_tracing = True
        try:
            yield
        finally:
            self._is_tracing = False

    def is_local_only(self, tensor: Tensor) -> bool:
        """Whether other replicas possibly do not run the code that passes this tensor."""
        return isinstance(tensor, ShapeOnly) or self._is_tracing

    def broadcast_from_first(self, tensors: Iterable[Tensor], what: str) -> None:
        """Copy tensors of any dtypes from replica 0 to all, small ones in one message.

        ``what`` names them in an error.
        """
        if self.num > 1:
            with reporting_lost_peers(f"lost a replica while {what} were sent"):
                broadcast_values(tensors, self.counterparts[0], not self.replica, self.group)


@torch.no_grad()
def broadcast_values(tensors: Iterable[Tensor], source: int, is_source: bool, group: Any) -> None:
    """Copy the values of tensors of any dtypes from a global rank to a group, in place.

    Small ones go in one message. All processes of the group call it, with tensors of the same
    shapes in the same order.
    """
    values = [tensor.detach() for tensor in tensors]
    dense = [value.contiguous() for value in values]
    parts = dict(enumerate(map(as_bytes, dense)))
    for numbers in bucket_keys(parts):
        bundle = FlatBucket([parts[number] for number in numbers])
        dist.broadcast(bundle.flat, source, group=group)
        if not is_source:
            bundle.unpack()
    for value, received in zip(values, dense, strict=True):
        if not is_source and received is not value:
            value.copy_(received)


class _AllGather(torch.autograd.Function):
    """All-gather with gradients; torch's own function confuses group ranks with global ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, replica: int) -> Tensor:
        ctx.group, ctx.replica = group, replica
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format)]
        parts += [torch.empty_like(parts[0]) for _ in range(dist.get_world_size(group) - 1)]
        with reporting_lost_peers("lost a replica in all_gather"):
            dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        with reporting_lost_peers("lost a replica in the backward of all_gather"):
            dist.all_reduce(total, group=ctx.group)
        return total[ctx.replica], None, None


class FlatBucket:
    """Tensors of one dtype, copied into ``flat``; a single contiguous tensor is not copied."""

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._is_copy = len(tensors) > 1 or not tensors[0].is_contiguous()
        parts = [tensor.reshape(-1) for tensor in tensors]
        self.flat = torch.cat(parts) if self._is_copy else tensors[0].view(-1)

    @torch.no_grad()
    def unpack(self, is_wanted: Callable[[int], bool] = lambda place: True) -> None:
        """Copy the values of ``flat`` back into the tensors, or into wanted ones."""
        if self._is_copy:
            parts = self.flat.split([tensor.numel() for tensor in self._tensors])
            for place, (tensor, part) in enumerate(zip(self._tensors, parts, strict=True)):
                if is_wanted(place):
                    tensor.copy_(part.view_as(tensor))


def bucket_keys(tensors: Mapping[_Key, Tensor]) -> Iterator[list[_Key]]:
    """Group tensors, in order, into buckets of one dtype; a large tensor has its own bucket."""
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


def assign_owners(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Assign each size to the owner with the smallest load, the largest size first.

    Args:
        sizes: Bytes, in an order that is the same on all processes.
        loads: The bytes that each owner has already; updated in place.

    Returns:
        The owner of each size.
    """
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


class PersistentBuffers:
    """Copies one rank's persistent buffers from replica 0, as DistributedDataParallel does.

    The running statistics of a BatchNorm, for example, depend on the data that a replica has read.
    Buffers that are not persistent are mostly large constants: masks, angles.
    """

    def __init__(self, replicas: Replicas, tensors: SplitModule) -> None:
        self._replicas = replicas
        # Private: the names of the non-persistent buffers.
        self._slots = [
            slot
            for slot in tensors.slots
            if slot.kind == "_buffers"
            and slot.attribute not in slot.module._non_persistent_buffers_set
            and tensors.is_local(slot.name)
        ]

    def broadcast_from_first(self) -> None:
        """Copy the buffers from replica 0; all replicas call it after a step."""
        if self._slots:
            self._replicas.broadcast_from_first([slot.tensor for slot in self._slots], "buffers")

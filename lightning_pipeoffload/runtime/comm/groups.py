"""The processes of one pipeline and their collectives.

After the first steps a training step uses three collectives: the sum of the gradients of shared
parameters; the norm of the gradients if they are clipped; and an asynchronous check that all ranks
have read the same batch. Tensor ranks also sum the gradients of norms.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_pipeoffload.runtime.comm.host_group import HostGroup, World
from lightning_pipeoffload.runtime.comm.mesh import ProcessGroups, RankMesh
from lightning_pipeoffload.runtime.comm.replicas import Bundle, Replicas, copy_values, in_buckets
from lightning_pipeoffload.runtime.comm.transport import (
    ProcessGroupTransport,
    blaming_peers,
    broadcast_bytes,
)
from lightning_pipeoffload.runtime.cut.split_module import SplitModule
from lightning_pipeoffload.runtime.cut.step_records import StepRecords
from lightning_pipeoffload.runtime.shapes.quantized_weight import with_state
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.sharding import (
    has_gradient_in_parts,
    is_shard,
    local_part,
)
from lightning_pipeoffload.schedule import Schedule


class _Shared(NamedTuple):
    """A parameter that all ``ranks`` share; ``is_first`` is True on ``ranks[0]``.

    ``always_trains()`` returns whether every training step gives it a gradient on some rank.
    """

    parameter: Tensor
    ranks: tuple[int, ...]
    is_first: bool
    always_trains: Callable[[], bool]


class PipelineGroup(RankMesh, HostGroup):
    """The processes of the pipeline that this process is in.

    Args:
        schedule: Defines which rank holds which stage.
        device: The device on which this rank computes.
        timeout: How long a rank waits for another; None: torch's default, not that of the
            default group.
        rank_order: How global ranks are assigned; see :class:`RankMesh`.
        num_tensor_ranks: The number of processes that share a stage's layers.

    Attributes:
        world: All processes of all replicas.
        device_mesh: All of them with the dimensions that ``configure_model`` shares layers over;
            None where layers are not shared.
        replicas: The counterparts of this process in the other replicas.
    """

    device_mesh: DeviceMesh | None = None

    def __init__(
        self,
        schedule: Schedule,
        global_rank: int,
        device: torch.device,
        timeout: timedelta | None = None,
        num_replicas: int = 1,
        rank_order: str = "pipeline_inner",
        num_tensor_ranks: int = 1,
    ) -> None:
        super().__init__(
            schedule, global_rank, timeout, num_replicas, rank_order, device, num_tensor_ranks
        )
        self.replicas = Replicas(self)
        self._connect()
        self.transport = ProcessGroupTransport(self, self._edges(), device)
        self._shared: list[_Shared] = []
        self._sharing: dict[tuple[int, ...], Any] = {}
        self._owner_of: Callable[[Tensor], int] | None = None
        self._is_divided = False
        self._parameters: list[Tensor] = []

    def _connect(self) -> None:
        self.world = World(self)  # all processes meet here
        ProcessGroups.abort_ended()
        self.replicas.connect()
        self.host_group, self.side_group = self.world.host_group, self.world.side_group
        if self.num_pipelines > 1:
            self.host_group = self.make_group("host", backend="gloo")
            self.side_group = self.make_group("side", backend="gloo")
        self._ranks_group = self.device_group()
        if self.num_tensor_ranks > 1:
            self.device_mesh = self.make_device_mesh()

    def renew(self) -> None:
        """Create all groups again, on all ranks, where :attr:`is_connected` is False."""
        self.join_groups()
        self._connect()
        self._sharing = {ranks: self.device_group(ranks) for ranks in self._sharing}
        self.transport.connect()

    def place(self, schedule: Schedule) -> None:
        """Assign stages to ranks as another schedule does; all processes call it between steps.

        The schedule must have the same number of ranks. Pipelines and counterparts stay the same.
        """
        if schedule.placement == self.stage_ranks:
            return
        self._lay_out(schedule, self.num_replicas, self._rank_order)
        self.transport = ProcessGroupTransport(self, self._edges(), self.device)

    def _edges(self) -> set[tuple[int, int]]:
        pairs = zip(self.stage_ranks, self.stage_ranks[1:], strict=False)
        downstream = {(a, b) for a, b in pairs if a != b}
        return downstream | {(b, a) for a, b in downstream}

    # Gradients that one replica has for all

    def divide_gradients(self, owner_of: Callable[[Tensor], int] | None) -> None:
        """Set the replica that steps each parameter; None: all replicas step all parameters."""
        self._owner_of, self._is_divided = owner_of, False

    @property
    def owner_of(self) -> Callable[[Tensor], int] | None:
        """A function that returns the replica that steps a parameter; None: all replicas do."""
        return self._owner_of

    def end_reduction(self) -> None:
        """Record that the gradients are reduced over the replicas.

        If they are divided, each one is on its owner only from now on. So :meth:`sum` and
        :meth:`largest` then include all replicas.
        """
        self._is_divided = self._owner_of is not None

    def owns(self, parameter: Tensor) -> bool:
        """Whether this replica has a parameter's gradient: all do until the reduction has ended."""
        if not self._is_divided:
            return True
        assert self._owner_of is not None
        return self._owner_of(parameter) == self.replica

    @property
    def sharing_gradients(self) -> HostGroup:
        """The processes that have the gradients of one model: a pipeline's, or all replicas'."""
        return self.world if self._is_divided else self

    @property
    def ranks_with_gradients(self) -> list[int]:
        """Global ranks that have the gradients of one model: of replica 0, or of all replicas."""
        num_replicas = 1 if self._owner_of is None else self.num_replicas
        return [rank for table in self._tables for row in table[:num_replicas] for rank in row]

    def drop_remote_gradients(self) -> None:
        """Set gradients owned by other replicas to None, before further ones are added."""
        self._is_divided = False
        for parameter in self._parameters:
            if isinstance(parameter.grad, ShapeOnly):
                parameter.grad = None

    # Values of one rank for others

    @override
    def gather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, in pipeline order."""
        by_global_rank = dict(zip(sorted(self.global_ranks), super().gather(obj), strict=True))
        return [by_global_rank[rank] for rank in self.global_ranks]

    def gather_from_pipelines(self, obj: Any) -> list[list[Any]]:
        """Return, for each pipeline of the run, the objects of its ranks in pipeline order.

        Plans depend on values from all pipelines, since all of them run the same plan.
        """
        of_all = self.world.gather(obj)
        return [[of_all[rank] for rank in pipeline] for pipeline in self.pipelines]

    def copy_to_hosts(self, tensor: Tensor, source: int, ranks: HostGroup | None = None) -> Tensor:
        """Return, on each rank's host, a copy of global rank ``source``'s tensor.

        The other ranks pass a tensor of the same shape and dtype. The copy of a packed 4-bit weight
        has its ``quant_state``. ``ranks`` are those of the pipeline by default.
        """
        group = (ranks or self).host_group
        return with_state(tensor, lambda part: broadcast_bytes(part, source, group, "cpu"))

    def copy_to_devices(self, tensor: Tensor, rank: int | None) -> Tensor:
        """Return, on this rank's device, a copy of the tensor of ``rank``; None: of the root.

        The other ranks pass a tensor of the same shape and dtype. The copy of a packed 4-bit weight
        has its ``quant_state``.
        """
        if self.num_ranks == 1:
            return tensor.to(self.device)
        source = self.root if rank is None else self.global_ranks[rank]

        def copy(part: Tensor) -> Tensor:
            with blaming_peers("lost a rank while broadcasting weights"):
                copied = broadcast_bytes(part, source, self._ranks_group, self.device)
            is_there = source == self.global_rank and part.device == self.device
            return part if is_there else copied

        return with_state(tensor, copy)

    # Parameters that several ranks have

    def share(self, tensors: SplitModule, records: StepRecords) -> None:
        """Copy shared parameters from their first owner, and common buffers from the root.

        Of ranks that share a stage's layers the first one sends what all of them have whole.
        """
        sharing = tensors.ranks_sharing()
        self._sharing = {ranks: self.device_group(ranks) for ranks in sharing}
        self._parameters = [*tensors.canonical_parameters().values()]
        self._shared = []
        for name, parameter, ranks in tensors.shared_parameters():
            source = self.global_ranks[ranks[0]]
            copy_values([parameter], source, self.global_rank == source, self._sharing[ranks])
            names = frozenset(tensors.aliases(name))
            trains = partial(records.always_train, names)
            self._shared.append(_Shared(parameter, ranks, self.rank == ranks[0], trains))
        copy_values(tensors.common_buffers(), self.root, self.is_root, self._ranks_group)
        if (
            self.num_tensor_ranks > 1
        ):  # a module that __init__ makes without a seed is drawn by each
            whole = [local_part(t) for t in tensors.distinct() if not is_shard(t)]
            first = self.global_rank - self.tensor_rank
            with blaming_peers("lost a rank that shares its layers while weights were sent"):
                copy_values(whole, first, self.global_rank == first, self.tensor_group())

    def sum_shared_gradients(self) -> None:
        """All-reduce the gradient of each shared parameter over the ranks that have it.

        Where no rank has a gradient, ``.grad`` stays None.
        """
        self._sum_over_tensor_ranks()
        if not self._shared:
            return
        with blaming_peers("lost a rank while summing tied weights' gradients"):
            for shared in self._shared:
                parameter, group = shared.parameter, self._sharing[shared.ranks]
                if not self.owns(parameter):  # so do this replica's other ranks
                    continue
                if not parameter.requires_grad or not self._has_gradient(shared, group):
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
                dist.all_reduce(parameter.grad, group=group)

    def _sum_over_tensor_ranks(self) -> None:
        """Sum gradients of which each tensor rank has a part, such as those of norms."""
        gradients = self._gradients_in_parts()
        with blaming_peers("lost a rank that shares its layers while summing their gradients"):
            for names in in_buckets(gradients):
                bundle = Bundle([gradients[name] for name in names])
                dist.all_reduce(bundle.flat, group=self.tensor_group())
                bundle.unpack()

    def _gradients_in_parts(self) -> dict[int, Tensor]:
        parameters = enumerate(self._parameters if self.num_tensor_ranks > 1 else ())
        return {
            index: parameter.grad
            for index, parameter in parameters
            if has_gradient_in_parts(parameter) and self.owns(parameter)
            if parameter.grad is not None
        }

    def _has_gradient(self, shared: _Shared, group: Any) -> bool:
        """Whether any rank has a gradient; an all-reduce, unless the parameter always trains."""
        if shared.always_trains():
            return True
        has_any = torch.tensor(int(shared.parameter.grad is not None), device=self.device)
        dist.all_reduce(has_any, dist.ReduceOp.MAX, group)
        return bool(has_any)

    @torch.no_grad()
    def part_shared_gradients(self) -> None:
        """Prevent the next sums over ranks and replicas from counting summed gradients twice.

        Only the first owner keeps the sum over ranks, and each tensor rank its share. Where
        gradients are divided among replicas, only a gradient's owner keeps it, times the number of
        replicas, since a mean follows.
        """
        for gradient in self._gradients_in_parts().values():
            gradient.div_(self.num_tensor_ranks)
        for shared in self._shared:
            if not shared.is_first:
                shared.parameter.grad = None
        if self._is_divided:
            for parameter in filter(self.owns, self._parameters):
                if parameter.requires_grad and parameter.grad is not None:
                    parameter.grad.mul_(self.num_replicas)
            self.drop_remote_gradients()

    def counts(self, parameter: Tensor) -> bool:
        """Whether this rank adds a parameter to sums over ranks, so that each counts once."""
        is_first = all(each.is_first for each in self._shared if each.parameter is parameter)
        is_once = not self.tensor_rank or is_shard(parameter)
        return is_first and is_once and self.owns(parameter)

    # Norms

    def connect_boundary(self) -> None:
        """Make the group for :meth:`start_adding`; all processes call it."""
        if self._owner_of is None:
            self._boundary_group = self.make_group("boundary", backend="gloo")
        else:
            self._boundary_group = self.make_world_group("boundary of all", backend="gloo")

    def start_adding(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Start to sum float64 numbers over all ranks, on their hosts and in place.

        Returns:
            A function that waits for the sums.
        """
        work = self._boundary_group.allreduce([numbers])

        def wait() -> Tensor:
            with blaming_peers("lost a rank while computing the gradient's norm"):
                work.wait()
            return numbers

        return wait

    def largest(self, number: Tensor) -> Tensor:
        """Return the maximum of a number over all ranks that share gradients."""
        largest = number.clone()
        with blaming_peers("lost a rank while looking for infinite gradients"):
            self._reduce(largest, dist.ReduceOp.MAX)
        return largest

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks that share gradients, on the device."""
        total = tensor.to(self.device, copy=True)
        with blaming_peers("lost a rank while computing the gradient's norm"):
            self._reduce(total, dist.ReduceOp.SUM)
        return total

    def _reduce(self, numbers: Tensor, operation: Any) -> None:
        dist.all_reduce(numbers, operation, self._ranks_group)
        if self._is_divided:
            dist.all_reduce(numbers, operation, self.replicas.group)
        if self.num_tensor_ranks > 1:
            dist.all_reduce(numbers, operation, self.tensor_group())

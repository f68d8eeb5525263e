"""The processes of one pipeline and their collectives, on tensors and plain objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_pipeoffload.runtime.comm.batch_channel import BatchChannel
from lightning_pipeoffload.runtime.comm.host_group import HostGroup, World
from lightning_pipeoffload.runtime.comm.mesh import ProcessGroups, RankMesh
from lightning_pipeoffload.runtime.comm.replicas import Replicas, broadcast_values
from lightning_pipeoffload.runtime.comm.transport import (
    ProcessGroupTransport,
    broadcast_bytes,
    reporting_lost_peers,
    wait_for,
)
from lightning_pipeoffload.runtime.device import Device, Devices, unprofiled
from lightning_pipeoffload.runtime.shapes import map_with_quant_state
from lightning_pipeoffload.schedule import Schedule


class PipelineGroup(RankMesh, HostGroup):
    """The processes of the pipeline that this process is in.

    Args:
        schedule: Defines which rank holds which stage.
        device: The device on which this rank computes.
        timeout: How long a rank waits for another; None: torch's default, not that of the
            default group.
        rank_order: How global ranks are assigned; see :class:`RankMesh`.
        num_tensor_ranks: The number of processes that share a stage's layers.
        fail: Ends the run because of an error in a thread; see :class:`RankMesh`.

    Attributes:
        world: All processes of all replicas.
        device_mesh: All of them with the dimensions that ``configure_model`` shares layers over;
            None where layers are not shared.
        replicas: The counterparts of this process in the other replicas.
        batches: To or from the process of this replica that reads the data.
        devices: The devices of its pipeline, as far as they are known.
    """

    device_mesh: DeviceMesh | None = None
    devices: Devices

    def __init__(
        self,
        schedule: Schedule,
        global_rank: int,
        device: torch.device,
        timeout: timedelta | None = None,
        num_replicas: int = 1,
        rank_order: str = "pipeline_inner",
        num_tensor_ranks: int = 1,
        fail: Callable[[BaseException, str], None] | None = None,
    ) -> None:
        super().__init__(
            schedule, global_rank, timeout, num_replicas, rank_order, device, num_tensor_ranks, fail
        )
        self.replicas = Replicas(self)
        self._connect()
        self.transport = ProcessGroupTransport(self, self._edges(), device)
        self._sharing: dict[tuple[int, ...], Any] = {}
        self.devices = Devices.of([Device.of(device)] * self.num_ranks)

    def _connect(self) -> None:
        self.world = World(self)  # all processes meet here
        ProcessGroups.abort_ended()
        self.replicas.connect()
        self.host_group, self.side_group = self.world.host_group, self.world.side_group
        if self.num_pipelines > 1:
            self.host_group = self.make_pipeline_group("host", backend="gloo")
            self.side_group = self.make_pipeline_group("side", backend="gloo")
        self.batches = BatchChannel(self)
        self._ranks_group = self.make_device_group()
        if self.num_tensor_ranks > 1:
            self.device_mesh = self.make_device_mesh()

    def reconnect(self) -> None:
        """Create all groups again, on all ranks, where :attr:`is_connected` is False."""
        self.select_process_groups()
        self._connect()
        self.make_sharing_groups(self._sharing)
        self.transport.connect()

    def assign_stages(self, schedule: Schedule) -> None:
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

    def broadcast_to_hosts(
        self, tensor: Tensor, source: int, ranks: HostGroup | None = None
    ) -> Tensor:
        """Return, on each rank's host, a copy of global rank ``source``'s tensor.

        The other ranks pass a tensor of the same shape and dtype. The copy of a packed 4-bit weight
        has its ``quant_state``. ``ranks`` are those of the pipeline by default.
        """
        group = (ranks or self).host_group
        return map_with_quant_state(
            tensor, lambda part: broadcast_bytes(part, source, group, "cpu")
        )

    def broadcast_to_devices(self, tensor: Tensor, rank: int | None) -> Tensor:
        """Return, on this rank's device, a copy of the tensor of ``rank``; None: of the root.

        The other ranks pass a tensor of the same shape and dtype. The copy of a packed 4-bit weight
        has its ``quant_state``.
        """
        if self.num_ranks == 1:
            return tensor.to(self.device)
        source = self.root if rank is None else self.global_ranks[rank]

        def copy(part: Tensor) -> Tensor:
            with reporting_lost_peers("lost a rank while broadcasting weights"):
                copied = broadcast_bytes(part, source, self._ranks_group, self.device)
            is_there = source == self.global_rank and part.device == self.device
            return part if is_there else copied

        return map_with_quant_state(tensor, copy)

    def ranks_of_first_replicas(self, num_replicas: int) -> list[int]:
        """Return the global ranks of the first replicas, tensor rank by tensor rank."""
        return [rank for table in self._tables for row in table[:num_replicas] for rank in row]

    # Tensors that several ranks have

    def make_sharing_groups(self, sharing: Iterable[tuple[int, ...]]) -> None:
        """Make a group for each tuple of ranks with the same tensors; all processes call it."""
        self._sharing = {ranks: self.make_device_group(ranks) for ranks in sharing}

    def broadcast_among(self, ranks: tuple[int, ...], tensors: Sequence[Tensor]) -> None:
        """Copy the tensors of the first of ``ranks`` to the others; these ranks call it."""
        source = self.global_ranks[ranks[0]]
        broadcast_values(tensors, source, self.global_rank == source, self._sharing[ranks])

    def broadcast_from_root(self, tensors: Sequence[Tensor]) -> None:
        """Copy the root's tensors to all ranks, which call it."""
        broadcast_values(tensors, self.root, self.is_root, self._ranks_group)

    def broadcast_to_tensor_ranks(self, tensors: Sequence[Tensor]) -> None:
        """Copy the first tensor rank's tensors to those that share this one's layers."""
        first = self.global_rank - self.tensor_rank
        with reporting_lost_peers("lost a rank that shares its layers while weights were sent"):
            broadcast_values(tensors, first, self.global_rank == first, self.make_tensor_group())

    def all_reduce_among(
        self, ranks: tuple[int, ...], tensor: Tensor, operation: Any = dist.ReduceOp.SUM
    ) -> None:
        """All-reduce a tensor in place over ``ranks``, which call it."""
        dist.all_reduce(tensor, operation, self._sharing[ranks])

    def all_reduce_over_ranks(self, numbers: Tensor, operation: Any, over_replicas: bool) -> None:
        """All-reduce a tensor in place over the ranks, and over the replicas if so asked."""
        dist.all_reduce(numbers, operation, self._ranks_group)
        if over_replicas:
            dist.all_reduce(numbers, operation, self.replicas.group)
        if self.num_tensor_ranks > 1:
            dist.all_reduce(numbers, operation, self.make_tensor_group())

    def make_boundary_group(self, over_replicas: bool) -> None:
        """Make the group for :meth:`start_host_sum`; all processes call it."""
        if over_replicas:
            self._boundary_group = self.make_world_group("boundary of all", backend="gloo")
        else:
            self._boundary_group = self.make_pipeline_group("boundary", backend="gloo")

    def start_host_sum(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Start to sum float64 numbers over all ranks, on their hosts and in place.

        Returns:
            A function that waits for the sums.
        """
        with unprofiled():
            work = self._boundary_group.allreduce([numbers])
        return partial(wait_for, work, "lost a rank while computing the gradient's norm", numbers)

"""The processes of ``odc``: start, connections and end."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import override

from lightning_pipeoffload.processes import JointStrategy, set_replica
from lightning_pipeoffload.runtime.comm import GroupLayout, HostGroup, ProcessGroups


class OnDemandProcesses(JointStrategy, ModelParallelStrategy):
    """Starts one process for each rank; those of a machine share the parameters."""

    _shard_ranks: HostGroup
    _group_size: int | None
    _why_alone = "ranks have different numbers of microbatches"

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def _configure_launcher(self) -> None:
        self._check_group_size(self.num_nodes * self.num_processes)
        self._launcher = self._make_launcher()

    @override
    def setup_environment(self) -> None:
        # The sizes of Lightning's own mesh, which a user's configure_model may read.
        self._data_parallel_size, self._tensor_parallel_size = (
            self.num_nodes * self.num_processes,
            1,
        )
        super().setup_environment()
        self._make_groups(self._check_group_size(self.world_size))
        set_replica(self.global_rank, self.world_size)
        self.processes.connect()

    @override
    def _setup_distributed(self) -> None:
        # Private: Lightning connects the ranks here; they have to watch each other before.
        self.set_world_ranks()
        self._watch()
        super()._setup_distributed()

    def _make_groups(self, size: int) -> None:
        """Connect all ranks, and those that share parameters: the same ranks on one machine."""
        groups = ProcessGroups.for_layout(
            GroupLayout(
                self.world_size // size,
                size,
                1,
                "odc",
                self.global_rank,
                self.root_device,
                self._timeout,
            )
        )
        self._shard_ranks = _host_group(groups, range(self.world_size))
        self.processes.set_groups(self._shard_ranks)
        ProcessGroups.abort_ended()
        if size == self.world_size:
            return
        shape = (self.world_size // size, size, 1)
        names = ("replicas", *self.device_mesh.mesh_dim_names)  # type: ignore[misc]
        self._device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)
        self._module._device_mesh = self._device_mesh
        for first in range(0, self.world_size, size):
            ranks = _host_group(groups, range(first, first + size))
            if first <= self.global_rank < first + size:
                self._shard_ranks = ranks

    def _check_group_size(self, world_size: int) -> int:
        """Return the number of ranks that share the parameters."""
        size = self._group_size or self.num_processes
        if world_size % size or size > self.num_processes or (size == 1 < world_size):
            raise ValueError(
                f"group_size={size} ranks cannot share the parameters among {world_size} with "
                f"{self.num_processes} on each machine: they read each other's memory, so it must "
                f"divide {self.num_processes}, and be more than one"
            )
        return size

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        self._refuse_lone_collective("reduce")
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        self._refuse_lone_collective("all_gather")
        return super().all_gather(tensor, group, sync_grads)


def _host_group(groups: ProcessGroups, members: range) -> HostGroup:
    return HostGroup(groups.get_or_create("host", tuple(members), {"backend": "gloo"}))

"""The processes of a pipeline, as Lightning starts, connects and ends them."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,  # private: as Lightning's own strategies
    _init_dist_connection,  # private: as Lightning's own strategies
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch.distributed import HashStore, Store  # type: ignore[attr-defined] # exported at run time
from typing_extensions import override

from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.processes.collectives import Collectives
from lightning_pipeoffload.processes.data_parallel import set_replica
from lightning_pipeoffload.processes.rank_differences import describe_settings, refuse_differences
from lightning_pipeoffload.processes.run_store import Meeting, connect_store
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.randomness import RandomnessReplay
from lightning_pipeoffload.schedule import Schedule

# For all ranks to come to a hook that needs them.
_PATIENCE = timedelta(seconds=60)


class PipelineProcesses(Collectives):
    """Starts one process for each rank, connects them, and ends them together."""

    settings: PipelineSettings
    _process_group_backend: str | None = None
    _metrics_store: Store | None = None
    _meeting: Meeting | None = None

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning has to divide the data among replicas."""
        return self.num_replicas > 1

    @property
    def num_replicas(self) -> int:
        """The number of replicas of the pipeline."""
        return self.settings.num_replicas(self.num_nodes * self.num_processes)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.group.num_replicas, "rank": self.group.replica}

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        num_ranks = self.settings.num_ranks(self.num_nodes * self.num_processes)
        self.settings.provisional_schedule(num_ranks)  # raises here, before processes start
        self._launcher = self._make_launcher()

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._set_world_ranks()
        self._watch()
        assert self.cluster_environment is not None
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            self.root_device
        )
        options: dict[str, Any] = {"timeout": self._timeout}
        if self.world_size == 1:
            options["store"] = HashStore()  # one rank needs no port
        _init_dist_connection(self.cluster_environment, backend, **options)
        if self._group is not None and self._must_reconnect:
            self._group.renew()
        self._must_reconnect = False
        if self._group is None:
            schedule = self.settings.provisional_schedule(self.settings.num_ranks(self.world_size))
            self._refuse_other_settings(schedule)
            self._group = PipelineGroup(
                schedule,
                self.global_rank,
                self.root_device,
                self._timeout,
                self.num_replicas,
                self.settings.rank_order,
            )
        self._world = self._group.world
        set_replica(self._group.replica, self._group.num_replicas)
        if self.world_size > 1:
            self._connect(self._group)
        self.agree_on_randomness()  # a module may be made between here and ``setup``

    def _set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        global_rank = self.node_rank * self.num_processes + self.local_rank
        self.cluster_environment.set_global_rank(global_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _refuse_other_settings(self, schedule: Schedule) -> None:
        """Compare the settings that decide on the pipeline's groups, before these are made."""
        if self.world_size > 1:
            group = dist.new_group(timeout=self._timeout, backend="gloo")
            refuse_differences(describe_settings(self.settings, schedule), group)
            dist.destroy_process_group(group)

    def _connect(self, group: PipelineGroup) -> None:
        """Open this rank's connections to the store of one fit or evaluation."""
        run = group.world.broadcast(secrets.token_hex(8), 0)
        self._metrics_store = connect_store(run, self._timeout)
        patience = min(self._timeout or _PATIENCE, _PATIENCE)
        self._meeting = Meeting(
            connect_store(run, self._timeout), self.global_rank, group.global_ranks, patience
        )
        assert self._board is not None
        self._board.place_of = group.place_of
        self._board.connect(connect_store(run, self._timeout))

    def agree_on_randomness(self) -> None:
        """Set every rank's global random generators to the state of global rank 0's."""
        replay = self.broadcast(RandomnessReplay())
        replay.restore()

"""The processes of a pipeline: start, connections, and the collective operations of a strategy.

Barriers, broadcasts and decisions are over all processes. Gathers and reductions are over the
replicas, as under ddp: each rank with its counterparts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,  # private: as Lightning's own strategies
    _init_dist_connection,  # private: as Lightning's own strategies
    _sync_ddp_if_available,  # private: as Lightning's own strategies
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined] # exported at run time
from typing_extensions import override

from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.processes.forking_launcher import ForkingLauncher, is_interactive
from lightning_pipeoffload.processes.joint_strategy import JointStrategy
from lightning_pipeoffload.processes.launcher import JointLauncher
from lightning_pipeoffload.processes.rank_differences import describe_settings, refuse_differences
from lightning_pipeoffload.processes.replica import set_replica
from lightning_pipeoffload.runtime import RandomStateSnapshot
from lightning_pipeoffload.runtime.comm import PipelineGroup
from lightning_pipeoffload.runtime.device import set_cuda_defaults
from lightning_pipeoffload.runtime.measure import measure_devices
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.runtime.users_code import find_slots
from lightning_pipeoffload.schedule import Schedule


def warn_of_split_tensor_groups(size: int, num_processes: int, num_nodes: int) -> None:
    """Warn if some of the ranks that share a stage's layers are on another machine."""
    if num_nodes > 1 and num_processes % size:
        rank_zero_warn(
            f"tensor_parallel_size={size} does not divide the {num_processes} devices of a "
            f"machine: ranks that share layers are on two machines, and wait for the link between "
            f"these in each block; choose a size that divides {num_processes}"
        )


class PipelineProcesses(JointStrategy):
    """Starts one process for each rank, connects them, and ends them together."""

    settings: PipelineSettings
    _process_group_backend: str | None = None
    _start_method: str | None = None
    _answer: Callable[[Any], Any] | None = None

    @property
    def group(self) -> PipelineGroup:
        """The pipeline's processes.

        Raises:
            RuntimeError: They are not connected yet.
        """
        if self.processes.group is None:
            raise RuntimeError("the pipeline's processes are not connected yet")
        return self.processes.group

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
        world_size = self.num_nodes * self.num_processes
        self.settings.check_world(world_size)
        num_ranks = self.settings.num_ranks(world_size)
        self.settings.provisional_schedule(num_ranks)  # raises here, before processes start
        self._launcher = self._make_launcher()

    @override
    def _make_launcher(self) -> JointLauncher:
        if not self._forks():
            return super()._make_launcher()
        assert self.cluster_environment is not None
        return ForkingLauncher(
            self.cluster_environment, self.num_processes, self._end_together, self._fail, self
        )

    def _forks(self) -> bool:
        """Return whether the ranks are forks of this process.

        Raises:
            ValueError: They have to be, but something else starts them.
        """
        environment, num_nodes = self.cluster_environment, self.num_nodes
        is_local = isinstance(environment, LightningEnvironment) and num_nodes == 1
        if self._start_method is None:
            forks = is_local and is_interactive() and self.num_processes > 1
            if forks:
                self._refuse_forks_of_tensor_ranks()
            return forks
        if not is_local:
            raise ValueError(
                f"start_method={self._start_method!r} starts the ranks of one machine, and here "
                f"{type(environment).__name__} has those of num_nodes={num_nodes}; leave it out"
            )
        self._refuse_forks_of_tensor_ranks()
        return True

    def _refuse_forks_of_tensor_ranks(self) -> None:
        size = self.settings.tensor_parallel_size
        if size > 1:
            raise ValueError(
                f"tensor_parallel_size={size} is not supported over forks of an interactive "
                f"interpreter, to which no rank returns whole layers; run a script"
            )

    @override
    def setup_environment(self) -> None:
        set_cuda_defaults(self.root_device)
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
        try:
            _init_dist_connection(self.cluster_environment, backend, **options)
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise RuntimeError(
                f"port {self.cluster_environment.main_port}, where the ranks meet, is used by "
                f"another process; end it, or set MASTER_PORT to a free port"
            ) from error
        group = self.processes.group
        if group is not None and not group.is_connected:
            group.reconnect()
        if group is None:
            size = self.settings.tensor_parallel_size
            warn_of_split_tensor_groups(size, self.num_processes, self.num_nodes)
            schedule = self.settings.provisional_schedule(self.settings.num_ranks(self.world_size))
            self._refuse_other_settings(schedule)
            group = PipelineGroup(
                schedule,
                self.global_rank,
                self.root_device,
                self._timeout,
                self.num_replicas,
                self.settings.rank_order,
                self.settings.tensor_parallel_size,
                self.processes.exit_for_thread_failure,
            )
            group.devices = measure_devices(group, self.settings.cache_folder)
        self.processes.set_groups(group.world, group)
        set_replica(group.replica, group.num_replicas, group.is_reader)
        self.processes.connect()
        self.broadcast_random_state()  # a module may be made between here and ``setup``

    def _set_world_ranks(self) -> None:
        assert self.cluster_environment is not None
        global_rank = self.node_rank * self.num_processes + self.local_rank
        self.cluster_environment.set_global_rank(global_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _refuse_other_settings(self, schedule: Schedule) -> None:
        """Compare the settings that define the pipeline's groups, before the groups are made."""
        if self.world_size > 1:
            group = dist.new_group(timeout=self._timeout, backend="gloo")
            refuse_differences(describe_settings(self.settings, schedule), group)
            dist.destroy_process_group(group)

    def broadcast_random_state(self) -> None:
        """Set every rank's global random generators to the state of global rank 0's."""
        replay = self.broadcast(RandomStateSnapshot())
        replay.restore()

    def _refuse_without_optimizers(self) -> None:
        """Raise a RuntimeError where forked ranks have ended with the optimizers' state."""
        if isinstance(self._launcher, ForkingLauncher) and self._launcher.has_fitted:
            raise RuntimeError(
                "the optimizers' state has ended with the processes of the fit; pass "
                "weights_only=True to trainer.save_checkpoint, or save during the fit, as "
                "ModelCheckpoint(save_last=True) does"
            )

    # What forked ranks return

    def summarize_run(self) -> Any:
        """Return what :meth:`restore_run_summary` needs."""

    def restore_run_summary(self, described: Any) -> None:
        """Show a run of forked ranks from now on."""

    def tensor_names_to_return(self) -> set[str]:
        """Return the parameters and buffers whose values this rank returns; all ranks call it."""
        group = self.group
        group.replicas.pending.wait()
        slots = find_slots(self._module)
        names = {slot.name for slot in slots if not isinstance(slot.tensor, ShapeOnly)}
        of_ranks = dict(zip(group.global_ranks, group.gather(names), strict=True))
        if group.replica:
            return set()
        before = (rank for rank in group.global_ranks if rank < group.global_rank)
        return names.difference(*(of_ranks[rank] for rank in before))

    # Collective operations

    @contextmanager
    def answering_next_broadcast(self, answer: Callable[[Any], Any]) -> Iterator[None]:
        """Have ``answer`` return the result of the next broadcast, which would wait."""
        self._answer = answer
        try:
            yield
        finally:
            self._answer = None

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        answer, self._answer = self._answer, None
        return super().broadcast(obj, src) if answer is None else answer(obj)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        """Gather this rank's tensor over replicas; with one replica return it unchanged."""
        group = self.processes.group
        if group is None or group.num_replicas == 1:
            return tensor
        return group.replicas.gather_tensor(tensor, differentiable=sync_grads)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce this rank's tensor over replicas."""
        pipeline = self.processes.group
        if pipeline is None or pipeline.num_replicas == 1 or not isinstance(tensor, Tensor):
            return tensor
        if pipeline.replicas.is_local_only(tensor):
            return tensor
        # A copy: the sum is in place, and a step may have logged the tensor.
        return _sync_ddp_if_available(tensor.clone(), pipeline.replicas.group, reduce_op)

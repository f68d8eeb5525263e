"""The processes of a pipeline: start, connections, and the collective operations of a strategy.

Barriers, broadcasts and decisions are over all processes. Gathers and reductions are over the
replicas, as under ddp: each rank with its counterparts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
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
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined] # exported at run time
from typing_extensions import override

from lightning_pipeoffload.planning.settings import PipelineSettings
from lightning_pipeoffload.processes.forking_launcher import ForkingLauncher, is_interactive
from lightning_pipeoffload.processes.joint_processes import JointProcesses, set_replica
from lightning_pipeoffload.processes.launcher import JointLauncher
from lightning_pipeoffload.processes.rank_differences import describe_settings, refuse_differences
from lightning_pipeoffload.processes.run_store import Meeting, connect_store
from lightning_pipeoffload.runtime.cuda_settings import prepare_cuda
from lightning_pipeoffload.runtime.groups import PipelineGroup
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.randomness import RandomnessReplay
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.transport import blaming_peers
from lightning_pipeoffload.runtime.users_code.tensor_slots import find_slots
from lightning_pipeoffload.schedule import Schedule

# Timeout for all ranks to reach a hook that needs them.
_PATIENCE = timedelta(seconds=60)


class PipelineProcesses(JointProcesses):
    """Starts one process for each rank, connects them, and ends them together.

    Attributes:
        metrics_store: The run's store, for numbers that ranks publish; None on one rank.
        meeting: Where ranks wait for each other in hooks; None on one rank.
    """

    settings: PipelineSettings
    _process_group_backend: str | None = None
    _start_method: str | None = None
    metrics_store: Store | None = None
    meeting: Meeting | None = None
    _group: PipelineGroup | None = None
    _answer: Callable[[Any], Any] | None = None

    @property
    def group(self) -> PipelineGroup:
        """The pipeline's processes.

        Raises:
            RuntimeError: They are not connected yet.
        """
        if self._group is None:
            raise RuntimeError("the pipeline's processes are not connected yet")
        return self._group

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
            return is_local and is_interactive() and self.num_processes > 1
        if not is_local:
            raise ValueError(
                f"start_method={self._start_method!r} starts the ranks of one machine, and here "
                f"{type(environment).__name__} has those of num_nodes={num_nodes}; leave it out"
            )
        return True

    @override
    def setup_environment(self) -> None:
        prepare_cuda(self.root_device)
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
        if self._group is not None and not self._group.is_connected:
            self._group.renew()
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
        """Compare the settings that define the pipeline's groups, before the groups are made."""
        if self.world_size > 1:
            group = dist.new_group(timeout=self._timeout, backend="gloo")
            refuse_differences(describe_settings(self.settings, schedule), group)
            dist.destroy_process_group(group)

    def _connect(self, group: PipelineGroup) -> None:
        """Open this rank's connections to the store of one fit or evaluation."""
        run = group.world.broadcast(secrets.token_hex(8), 0)
        self.metrics_store = connect_store(run, "metrics", self._timeout)
        patience = min(self._timeout or _PATIENCE, _PATIENCE)
        self.meeting = Meeting(
            connect_store(run, "meeting", self._timeout),
            self.global_rank,
            group.global_ranks,
            patience,
        )
        assert self.board is not None
        self.board.place_of = group.place_of
        self.board.connect(connect_store(run, "board", self._timeout))

    def agree_on_randomness(self) -> None:
        """Set every rank's global random generators to the state of global rank 0's."""
        replay = self.broadcast(RandomnessReplay())
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

    def describe_run(self) -> Any:
        """Return what :meth:`recall_run` needs."""

    def recall_run(self, described: Any) -> None:
        """Show a run of forked ranks from now on."""

    def names_to_return(self) -> set[str]:
        """Return the parameters and buffers whose values this rank returns; all ranks call it."""
        assert self.lightning_module is not None
        group = self.group
        group.replicas.pending.settle()
        slots = find_slots(self.lightning_module)
        names = {slot.name for slot in slots if not isinstance(slot.tensor, ShapeOnly)}
        of_ranks = dict(zip(group.global_ranks, group.gather(names), strict=True))
        if group.replica:
            return set()
        before = (rank for rank in group.global_ranks if rank < group.global_rank)
        return names.difference(*(of_ranks[rank] for rank in before))

    # Collective operations

    @contextmanager
    def answering(self, answer: Callable[[Any], Any]) -> Iterator[None]:
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
        if self._group is None or self._group.num_replicas == 1:
            return tensor
        return self._group.replicas.gather_tensor(tensor, differentiable=sync_grads)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce this rank's tensor over replicas."""
        if self._group is None or self._group.num_replicas == 1 or not isinstance(tensor, Tensor):
            return tensor
        if self._group.replicas.is_alone_with(tensor):
            return tensor
        # A copy: the sum is in place, and a step may have logged the tensor.
        return _sync_ddp_if_available(tensor.clone(), self._group.replicas.group, reduce_op)


def gather_tensor(pipeline: Pipeline, tensor: Tensor) -> Tensor:
    """Return a copy of a parameter, buffer or gradient on every rank; all ranks call it.

    Raises:
        ValueError: The tensor is no parameter, buffer or gradient, or ranks pass different ones.
    """
    group = pipeline.group
    name = next((name for name, found in _known(pipeline) if found is tensor), "")
    has_value = bool(name) and not isinstance(tensor, ShapeOnly)
    asked = group.gather((name, has_value))
    _check_alike([each for each, _ in asked], tensor)
    owner = next(rank for rank, (_, has) in zip(group.global_ranks, asked, strict=True) if has)
    with blaming_peers("lost a rank while gathering a tensor"):
        return group.bring_to_all(tensor, owner).to(tensor.device)


def _known(pipeline: Pipeline) -> Iterator[tuple[str, Tensor | None]]:
    for slot in find_slots(pipeline.module):
        yield slot.name, slot.tensor
        if slot.kind == "_parameters":
            yield f"{slot.name}.grad", slot.tensor.grad


def _check_alike(names: list[str], tensor: Tensor) -> None:
    if not all(names):
        raise ValueError(
            f"trainer.strategy.gather() was given a tensor of shape {tuple(tensor.shape)} that is "
            f"no parameter, buffer or gradient of the module; give it the parameter itself, not "
            f"what was computed from it"
        )
    if len(set(names)) > 1:
        raise ValueError(
            f"the ranks ask trainer.strategy.gather() for different tensors, {', '.join(names)}; "
            f"call it in the same order on all of them"
        )

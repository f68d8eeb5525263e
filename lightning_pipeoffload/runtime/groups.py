"""The ranks of one pipeline as processes: what they do together.

Nothing here is in the steady path but the sum of shared gradients, the norm if gradients are
clipped, and the batch's comparison, for which nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_pipeoffload.runtime.host_group import HostGroup, World, start_sharing
from lightning_pipeoffload.runtime.mesh import RankMesh
from lightning_pipeoffload.runtime.pipeline import Pipeline
from lightning_pipeoffload.runtime.replicas import Replicas
from lightning_pipeoffload.runtime.transport import ProcessGroupTransport, as_bytes, blaming_peers
from lightning_pipeoffload.schedule import Schedule


class _Shared(NamedTuple):
    """A parameter of this rank that others have too.

    Attributes:
        parameter: This rank's parameter.
        ranks: The ranks that have it.
        is_first: Whether this rank is the first of them.
        always_trains: A function that says whether each step gives one of them a gradient.
    """

    parameter: Tensor
    ranks: tuple[int, ...]
    is_first: bool
    always_trains: Callable[[], bool]

    def sum(self, group: Any) -> None:
        """Sum the gradients of all of them, in their group."""
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        dist.all_reduce(self.parameter.grad, group=group)


class PipelineGroup(RankMesh, HostGroup):
    """What the processes of a pipeline do together, as one of them sees it.

    Args:
        schedule: The schedule, which says which rank holds which stage.
        global_rank: The global rank of this process.
        device: The device on which this rank computes.
        timeout: How long a rank waits for another; None: as torch does, whatever the default
            group's is.
        num_replicas: The number of replicas of the pipeline.
        rank_order: Which global ranks are neighbours; see :class:`RankMesh`.

    Attributes:
        world: All processes, those of other replicas too.
        replicas: The counterparts of this process in the other replicas.
    """

    def __init__(
        self,
        schedule: Schedule,
        global_rank: int,
        device: torch.device,
        timeout: timedelta | None = None,
        num_replicas: int = 1,
        rank_order: str = "pipeline_inner",
    ) -> None:
        super().__init__(schedule, global_rank, timeout, num_replicas, rank_order)
        self.device = device
        self.replicas = Replicas(self)
        self._connect()
        self.transport = ProcessGroupTransport(self, self._edges(), device)
        self._shared: list[_Shared] = []
        self._sharing: dict[tuple[int, ...], Any] = {}

    def _connect(self) -> None:
        self.world = World(self)
        self.replicas.connect()
        self.host_group, self._side_group = self.world.host_group, self.world.side_group
        if self.num_replicas > 1:
            self.host_group = self.make_group(backend="gloo")
            self._side_group = self.make_group(backend="gloo")
        self._device_group = self.device_group()

    def renew(self) -> None:
        """Connect anew, on all ranks: what was under way between them was broken off."""
        self.abort_device_groups()
        self._connect()
        self._sharing = {ranks: self.device_group(ranks) for ranks in self._sharing}
        self.transport.connect()

    def place(self, schedule: Schedule) -> None:
        """Be the ranks of another schedule from now on; all processes call it, between steps.

        The processes of a pipeline stay those, and so do the counterparts of each.

        Args:
            schedule: The schedule, for as many ranks.
        """
        if schedule.placement == self.stage_ranks:
            return
        self._lay_out(schedule, self.num_replicas, self._rank_order)
        self.transport = ProcessGroupTransport(self, self._edges(), self.device)

    def _edges(self) -> set[tuple[int, int]]:
        hops = zip(self.stage_ranks, self.stage_ranks[1:], strict=False)
        downstream = {(a, b) for a, b in hops if a != b}
        return downstream | {(b, a) for a, b in downstream}

    @override
    def gather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, in pipeline order."""
        by_global_rank = dict(zip(sorted(self.global_ranks), super().gather(obj), strict=True))
        return [by_global_rank[rank] for rank in self.global_ranks]

    def start_sharing(self, number: int, src: int) -> Callable[[], int]:
        """Return a function that waits for the number of global rank ``src``."""
        root = dist.get_group_rank(self._side_group, src)
        return start_sharing(self._side_group, number, root)

    def bring_to_all(self, tensor: Tensor, source: int) -> Tensor:
        """Return, on each rank's host, a copy of a tensor that one of them has.

        Args:
            tensor: That rank's tensor, or what has its shape.
            source: The global rank that has it.
        """
        found = torch.empty(tensor.shape, dtype=tensor.dtype)
        if self.global_rank == source:
            found.copy_(tensor.detach())
        # As bytes: gloo does not know every dtype.
        dist.broadcast(as_bytes(found), source, group=self.host_group)
        return found

    def send_to_all(self, tensor: Tensor, rank: int | None) -> Tensor:
        """Return, on this rank's device, a tensor that a rank of the pipeline has.

        Args:
            tensor: That rank's tensor, or what has its shape.
            rank: A pipeline rank; None: the root.
        """
        if self.num_ranks == 1:
            return tensor.to(self.device)
        source = self.root if rank is None else self.global_ranks[rank]
        is_source = source == self.global_rank
        found = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        if is_source:
            found.copy_(tensor.detach())
        with blaming_peers("lost a rank while weights were lent"):
            dist.broadcast(as_bytes(found), source, group=self._device_group)
        return tensor if is_source and tensor.device == self.device else found

    def share(self, pipeline: Pipeline) -> None:
        """Agree on what several ranks own: their first one's value counts."""
        sharing = pipeline.tensors.ranks_sharing()
        self._sharing = {ranks: self.device_group(ranks) for ranks in sharing}
        self._shared = []
        for name, parameter, ranks in pipeline.tensors.shared_parameters():
            source = self.global_ranks[ranks[0]]
            _broadcast(parameter, source, self._sharing[ranks])
            names = frozenset(pipeline.tensors.aliases(name))
            trains = partial(pipeline.records.always_train, names)
            self._shared.append(_Shared(parameter, ranks, self.rank == ranks[0], trains))
        for buffer in pipeline.tensors.common_buffers():
            _broadcast(buffer, self.root, self._device_group)

    def sum_shared_gradients(self) -> None:
        """Give all owners of a parameter the sum of their gradients; none where nobody has one."""
        with blaming_peers("lost a rank while summing tied weights' gradients"):
            for shared in self._shared:
                if shared.parameter.requires_grad and self._has_gradient(shared):
                    shared.sum(self._sharing[shared.ranks])

    def _has_gradient(self, shared: _Shared) -> bool:
        """Whether any rank has a gradient of the parameter; asks only where that is not known."""
        if shared.always_trains():
            return True
        found = torch.tensor(int(shared.parameter.grad is not None), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX, self._sharing[shared.ranks])
        return bool(found)

    def part_shared_gradients(self) -> None:
        """Leave each sum to one of its owners, so that what follows is counted once."""
        for shared in self._shared:
            if not shared.is_first:
                shared.parameter.grad = None

    def counts(self, parameter: Tensor) -> bool:
        """Whether this rank is the one that counts a parameter in what is summed over ranks."""
        return all(shared.is_first for shared in self._shared if shared.parameter is parameter)

    def connect_borders(self) -> None:
        """Make the group for :meth:`start_adding`; all processes call it."""
        self._border_group = self.make_group(backend="gloo")

    def start_adding(self, numbers: Tensor) -> Callable[[], Tensor]:
        """Start to add numbers of all ranks, beside what else they do; return what waits for them.

        Args:
            numbers: This rank's, on the host, in float64.
        """
        work = self._border_group.allreduce([numbers])

        def wait() -> Tensor:
            with blaming_peers("lost a rank while computing the gradient's norm"):
                work.wait()
            return numbers

        return wait

    def largest(self, number: Tensor) -> Tensor:
        """Return the largest of a number over all ranks."""
        found = number.clone()
        with blaming_peers("lost a rank while looking for infinite gradients"):
            dist.all_reduce(found, dist.ReduceOp.MAX, self._device_group)
        return found

    def sum(self, own: Tensor) -> Tensor:
        """Return the sum over all ranks of what each has for its gradients."""
        total = own.to(self.device, copy=True)
        with blaming_peers("lost a rank while computing the gradient's norm"):
            dist.all_reduce(total, group=self._device_group)
        return total


@torch.no_grad()
def _broadcast(tensor: Tensor, source: int, group: Any) -> None:
    """Let a tensor have the value of another rank's, whatever its dtype and layout are."""
    data = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.broadcast(as_bytes(data), source, group=group)
    tensor.detach().copy_(data)

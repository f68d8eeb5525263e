"""Which rank has, counts and sums the gradient of which parameter.

After the first steps a training step uses three collectives: the sum of the gradients of shared
parameters; the norm of the gradients if they are clipped; and an asynchronous check that all ranks
have read the same batch. Tensor ranks also sum the gradients of norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeoffload.runtime.comm import (
    FlatBucket,
    HostGroup,
    PipelineGroup,
    bucket_keys,
    reporting_lost_peers,
)
from lightning_pipeoffload.runtime.cut import SplitModule, StepRecords
from lightning_pipeoffload.runtime.shapes import (
    ShapeOnly,
    has_partial_gradient,
    is_shard,
    local_part,
)


class _Shared(NamedTuple):
    """A parameter that all ``ranks`` share.

    ``always_trains()`` returns whether every training step gives it a gradient on some rank.
    """

    parameter: Tensor
    ranks: tuple[int, ...]
    always_trains: Callable[[], bool]


class Gradients:
    """The gradients of this rank's parameters, among those of the pipeline and its replicas.

    Args:
        group: The processes of the pipeline.

    Attributes:
        updating_replica: Returns the replica that steps a parameter; None: all replicas step all.
    """

    def __init__(self, group: PipelineGroup) -> None:
        self._group = group
        self.updating_replica: Callable[[Tensor], int] | None = None
        self._is_divided = False
        self._parameters: list[Tensor] = []
        self._shared: list[_Shared] = []
        self._counted_elsewhere: set[int] = set()

    def broadcast_shared(self, tensors: SplitModule, records: StepRecords) -> None:
        """Copy shared parameters from their first owner, and common buffers from the root.

        Of ranks that share a stage's layers the first one sends what all of them have whole. All
        ranks call it, before the first training step.
        """
        group = self._group
        group.make_sharing_groups(tensors.sharing_rank_sets())
        self._parameters = [*tensors.canonical_parameters().values()]
        self._shared = []
        for name, parameter, ranks in tensors.shared_parameters():
            group.broadcast_among(ranks, [parameter])
            trains = partial(records.is_always_trained, frozenset(tensors.aliases(name)))
            self._shared.append(_Shared(parameter, ranks, trains))
        group.broadcast_from_root(tensors.common_buffers())
        if group.num_tensor_ranks > 1:  # each draws a module that __init__ makes without a seed
            group.broadcast_to_tensor_ranks(
                [local_part(t) for t in tensors.distinct() if not is_shard(t)]
            )
        whole = [p for p in self._parameters if not is_shard(p)] if group.tensor_rank else []
        elsewhere = (each.parameter for each in self._shared if each.ranks[0] != group.rank)
        self._counted_elsewhere = {id(parameter) for parameter in (*whole, *elsewhere)}

    # Gradients that one replica has for all

    def set_owners(self, updating_replica: Callable[[Tensor], int] | None) -> None:
        """Set the replica that steps each parameter; None: all replicas step all parameters."""
        self.updating_replica, self._is_divided = updating_replica, False

    def mark_gradients_reduced(self) -> None:
        """Record that the gradients are reduced over the replicas.

        If they are divided, each one is on its owner only from now on. So
        :meth:`sum_over_ranks` and :meth:`max_over_ranks` then include all replicas.
        """
        self._is_divided = self.updating_replica is not None

    def owns(self, parameter: Tensor) -> bool:
        """Whether this replica has a parameter's gradient: all do until the reduction has ended."""
        if not self._is_divided:
            return True
        assert self.updating_replica is not None
        return self.updating_replica(parameter) == self._group.replica

    @property
    def group_with_all_gradients(self) -> HostGroup:
        """The processes that have the gradients of one model: a pipeline's, or all replicas'."""
        return self._group.world if self._is_divided else self._group

    @property
    def ranks(self) -> list[int]:
        """Global ranks that have the gradients of one model: of replica 0, or of all replicas."""
        return self._group.ranks_of_first_replicas(
            1 if self.updating_replica is None else self._group.num_replicas
        )

    def drop_remote_gradients(self) -> None:
        """Set gradients owned by other replicas to None, before further ones are added."""
        self._is_divided = False
        for parameter in self._parameters:
            if isinstance(parameter.grad, ShapeOnly):
                parameter.grad = None

    # Which parameters a sum or a norm includes

    def with_local_gradient(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return those of the parameters whose gradient this rank has, or would have."""
        own = [p for p in parameters if not isinstance(p, ShapeOnly)]
        return [*filter(self.owns, own)] if self._is_divided else own

    def counted_gradients(self, parameters: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the gradients that this rank adds to sums over ranks, by the parameter's position.

        So each gradient of the model counts once.
        """
        elsewhere = self._counted_elsewhere
        gradients = {
            index: p.grad
            for index, p in enumerate(parameters)
            if not isinstance(p, ShapeOnly) and p.grad is not None and id(p) not in elsewhere
        }
        if not self._is_divided:
            return gradients
        return {index: grad for index, grad in gradients.items() if self.owns(parameters[index])}

    # Sums

    def sum_shared_gradients(self) -> None:
        """All-reduce the gradient of each shared parameter over the ranks that have it.

        Where no rank has a gradient, ``.grad`` stays None.
        """
        if self._group.num_tensor_ranks > 1:
            self._sum_over_tensor_ranks()
        if not self._shared:
            return
        with reporting_lost_peers("lost a rank while summing tied weights' gradients"):
            for shared in self._shared:
                parameter = shared.parameter
                if not self.owns(parameter):  # so do this replica's other ranks
                    continue
                if not parameter.requires_grad or not self._any_rank_has_gradient(shared):
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
                self._group.all_reduce_among(shared.ranks, parameter.grad)

    def _sum_over_tensor_ranks(self) -> None:
        """Sum gradients of which each tensor rank has a part, such as those of norms."""
        gradients = self._gradients_in_parts()
        with reporting_lost_peers(
            "lost a rank that shares its layers while summing their gradients"
        ):
            for names in bucket_keys(gradients):
                bundle = FlatBucket([gradients[name] for name in names])
                dist.all_reduce(bundle.flat, group=self._group.make_tensor_group())
                bundle.unpack()

    def _gradients_in_parts(self) -> dict[int, Tensor]:
        parameters = enumerate(self._parameters if self._group.num_tensor_ranks > 1 else ())
        return {
            index: parameter.grad
            for index, parameter in parameters
            if has_partial_gradient(parameter) and self.owns(parameter)
            if parameter.grad is not None
        }

    def _any_rank_has_gradient(self, shared: _Shared) -> bool:
        """Whether any rank has a gradient; an all-reduce, unless the parameter always trains."""
        if shared.always_trains():
            return True
        has_any = torch.tensor(int(shared.parameter.grad is not None), device=self._group.device)
        self._group.all_reduce_among(shared.ranks, has_any, dist.ReduceOp.MAX)
        return bool(has_any)

    @torch.no_grad()
    def prevent_double_counting(self) -> None:
        """Prevent the next sums over ranks and replicas from counting summed gradients twice.

        Only the first owner keeps the sum over ranks, and each tensor rank its share. Where
        gradients are divided among replicas, only a gradient's owner keeps it, times the number of
        replicas, since a mean follows.
        """
        for gradient in self._gradients_in_parts().values():
            gradient.div_(self._group.num_tensor_ranks)
        for shared in self._shared:
            if shared.ranks[0] != self._group.rank:
                shared.parameter.grad = None
        if self._is_divided:
            for parameter in filter(self.owns, self._parameters):
                if parameter.requires_grad and parameter.grad is not None:
                    parameter.grad.mul_(self._group.num_replicas)
            self.drop_remote_gradients()

    def max_over_ranks(self, number: Tensor) -> Tensor:
        """Return the maximum of a number over all ranks that share gradients."""
        largest = number.clone()
        with reporting_lost_peers("lost a rank while looking for infinite gradients"):
            self._group.all_reduce_over_ranks(largest, dist.ReduceOp.MAX, self._is_divided)
        return largest

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks that share gradients, on the device."""
        total = tensor.to(self._group.device, copy=True)
        with reporting_lost_peers("lost a rank while computing the gradient's norm"):
            self._group.all_reduce_over_ranks(total, dist.ReduceOp.SUM, self._is_divided)
        return total

"""REDUCE: the mean of gradients over replicas, which overlaps with the last weight gradients.

During a stage's last W's, gradients become final one parameter after another. As soon as all
gradients of a **bucket** are final, its sum over the replicas starts; all replicas sum the buckets
in the same order::

    W of the last microbatches   [ layer 9 ][ layer 8 ][ layer 7 ]
    sums over the replicas                  [ layer 9 ][ layer 8 ][ layer 7 ]  the optimizer's step

The order is that in which gradients became final on replica 0 in the first step. Weights that
several stages of a rank use come last, with a gradient for each stage, so that the result has the
same bits as if these stages were on several ranks.

Where each parameter is stepped by one replica, its **owner**, only the owner gets the sum; the
gradient is a remote one on the other replicas, until the next batch's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.comm import (
    FlatBucket,
    PersistentBuffers,
    Replicas,
    SumsToOwners,
    bucket_keys,
)
from lightning_pipeoffload.runtime.shapes import RemoteGradient
from lightning_pipeoffload.runtime.step import StageGradient

_Holder = Tensor | StageGradient  # of a gradient, in ``grad``


class GradientReduction:
    """Averages the gradients of a rank's parameters over the replicas.

    Args:
        parameters: The rank's parameters by name, each with the rank's stages that use it.
        apart: Gradients of single stages that are not in ``parameter.grad``, by name.
        updating_replica: Returns the replica that steps a parameter; None: all replicas step all.
        buffers: Those that are copied once the gradients are averaged; None: none are.
    """

    def __init__(
        self,
        replicas: Replicas,
        parameters: Mapping[str, tuple[Tensor, frozenset[int]]],
        apart: Mapping[str, StageGradient],
        updating_replica: Callable[[Tensor], int] | None = None,
        buffers: PersistentBuffers | None = None,
    ) -> None:
        self._replicas, self._updating_replica, self._buffers = replicas, updating_replica, buffers
        self._tensors = {name: tensor for name, (tensor, _) in parameters.items()}
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        self._stages = {name: stages for name, (_, stages) in parameters.items() if len(stages) < 2}
        self._holders: dict[str, _Holder] = {**self._tensors, **apart}
        self._tensors |= {name: gradient.parameter for name, gradient in apart.items()}
        self._trained: dict[str, int] = {}  # with their places among them
        self._buckets: list[_Bucket] | None = None
        self._final: dict[str, None] = {}
        self._done: set[int] = set()
        self._num_started = 0
        self._wait_for_union: Callable[[], None] = _nothing
        self._to_owners: SumsToOwners | None = None

    def mark_gradients_final(self, stage: int, coming: Iterable[Tensor] = ()) -> None:
        """Record that a stage's last B has run: its gradients are final except ``coming``.

        The gradients of parameters in ``coming`` become final in later W's.
        """
        if not self._done:
            self._record_trained()
        self._done.add(stage)
        later = {self._names[id(parameter)] for parameter in coming}
        self._add_final(name for name in self._trained if name not in later)

    def mark_parameter_final(self, parameter: Tensor) -> None:
        """Record that the last W of a parameter has run."""
        name = self._names[id(parameter)]
        if name in self._trained:
            self._add_final([name])

    def wait(self) -> None:
        """Wait until all gradients are averaged; all replicas call it after the plan's last W."""
        self._record_trained()
        self._final.update(dict.fromkeys(self._trained))
        buckets = self._buckets = self._buckets or self._make_buckets()
        for bucket in buckets[self._num_started :]:
            bucket.start(self._replicas)
        self._wait_for_union()  # of the step before
        absent = [name for bucket in buckets for name in bucket.absent]
        here = torch.tensor([name not in absent for name in self._trained], dtype=torch.uint8)
        self._wait_for_union = self._replicas.start_logical_or(here)
        for bucket in buckets:
            bucket.end()
        if absent:
            self._wait_for_union()
            for name in absent:
                if not here[self._trained[name]]:  # on any replica
                    self._holders[name].grad = None
        self._begin()
        if self._buffers is not None:
            self._buffers.broadcast_from_first()

    def _make_buckets(self) -> list[_Bucket]:
        """Make buckets, in the order in which gradients became final on replica 0."""
        order: list[str] = self._replicas.broadcast_object(list(self._final))
        if different := sorted({*order} ^ {*self._trained}):
            raise RuntimeError(
                f"{different[0]} is trained by some replicas of the pipeline and not by others; "
                f"freeze and unfreeze alike on all ranks"
            )
        tensors = {name: self._tensors[name] for name in order}
        return [self._make_bucket(names, tensors) for names in bucket_keys(tensors)]

    def _make_bucket(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> _Bucket:
        if self._updating_replica is None:
            return _Bucket(names, tensors, self._holders)
        owners = {name: self._updating_replica(tensors[name]) for name in names}
        return _OwnedBucket(owners, tensors, self._holders, self._sums_to_owners)

    def _sums_to_owners(self) -> SumsToOwners:
        if self._to_owners is None:
            self._to_owners = self._replicas.sums_to_owners()
        return self._to_owners

    def abandon(self) -> None:
        """Discard pending sums after an error."""
        self._buckets = None
        self._wait_for_union = _nothing
        self._begin()

    def _begin(self) -> None:
        self._to_owners = None
        self._final.clear()
        self._done.clear()
        self._num_started = 0

    def _record_trained(self) -> None:
        names = [name for name, tensor in self._tensors.items() if tensor.requires_grad]
        trained = {name: place for place, name in enumerate(names)}
        if trained != self._trained:
            self._trained, self._buckets = trained, None

    def _add_final(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._stages and self._stages[name] <= self._done:
                self._final.setdefault(name)
        for bucket in (self._buckets or [])[self._num_started :]:
            if not bucket.names <= self._final.keys():
                break
            bucket.start(self._replicas)
            self._num_started += 1


class _Bucket:
    """Gradients that are summed together; ``absent`` lists those that this rank does not have."""

    def __init__(
        self, names: Sequence[str], tensors: Mapping[str, Tensor], holders: Mapping[str, _Holder]
    ) -> None:
        self.names = frozenset(names)
        self._tensors = {name: tensors[name] for name in names}
        self._holders = {name: holders[name] for name in names}
        self.absent: list[str] = []

    @torch.no_grad()
    def start(self, replicas: Replicas) -> None:
        self.absent = [name for name, holder in self._holders.items() if holder.grad is None]
        for name in self.absent:
            tensor = self._tensors[name]
            self._holders[name].grad = torch.zeros_like(tensor, dtype=tensor.grad_dtype)
        self._bundle = FlatBucket([*self._gradients()])
        flat = self._bundle.flat
        flat.div_(replicas.num)  # before they are added, so that half precision does not overflow
        numbers = torch.view_as_real(flat) if flat.is_complex() else flat
        self._wait = self._start_sum(replicas, numbers)

    def _start_sum(self, replicas: Replicas, numbers: Tensor) -> Callable[[], None]:
        return replicas.start_sum(numbers)

    def _gradients(self) -> Iterator[Tensor]:
        for name, holder in self._holders.items():
            gradient = holder.grad
            assert gradient is not None
            if gradient.layout is not torch.strided:
                raise ValueError(
                    f"{name} has a gradient of layout {gradient.layout}, which replicas do not "
                    f"sum; make it dense, with sparse=False in nn.Embedding say"
                )
            yield gradient

    def end(self) -> None:
        """Wait for the sum and copy it into the gradients."""
        self._wait()
        self._unpack()
        del self._bundle, self._wait

    def _unpack(self) -> None:
        self._bundle.unpack()


class _OwnedBucket(_Bucket):
    """Gradients summed on the replica that steps the parameter; other replicas get remote ones.

    Args:
        owners: The names, with the replica that steps each.
        tensors: The parameters by name.
        holders: The gradients by name.
        sums: Returns the object that sums this step's gradients.
    """

    def __init__(
        self,
        owners: Mapping[str, int],
        tensors: Mapping[str, Tensor],
        holders: Mapping[str, _Holder],
        sums: Callable[[], SumsToOwners],
    ) -> None:
        super().__init__(sorted(owners, key=owners.__getitem__), tensors, holders)
        self._owners, self._sums = owners, sums
        self._remote: dict[str, RemoteGradient] = {}

    def _start_sum(self, replicas: Replicas, numbers: Tensor) -> Callable[[], None]:
        self._replica = replicas.replica
        lengths = [0] * replicas.num
        for name, holder in self._holders.items():
            assert holder.grad is not None
            lengths[self._owners[name]] += holder.grad.numel() * (1 + holder.grad.is_complex())
        return self._sums().start(numbers.view(-1), lengths)

    def _unpack(self) -> None:
        owners = [self._owners[name] for name in self._holders]
        self._bundle.unpack(lambda place: owners[place] == self._replica)
        for name, holder in self._holders.items():
            if self._owners[name] != self._replica:
                holder.grad = self._remote_gradient(name, holder)

    def _remote_gradient(self, name: str, holder: _Holder) -> RemoteGradient:
        """Return the same object in each step, for which nothing is known yet."""
        remote, part = self._remote.get(name), holder.grad
        assert part is not None
        if remote is None or remote.dtype != part.dtype:
            remote = RemoteGradient.of_replica(part, name, self._owners[name])
            self._remote[name] = remote
        remote.set_norms(None)
        return remote


def _nothing() -> None:
    pass

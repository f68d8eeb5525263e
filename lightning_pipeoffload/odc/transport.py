"""Transfers shards and gradients between ranks that do not wait for each other.

A minibatch consists of four operations::

    publish      every rank copies its shards to shared memory
    gather       a rank reads the shards of all ranks whenever it needs them
    accumulate   a rank adds its gradients to each owner's sum whenever it has them
    finish       after all ranks have added theirs, each has the sums of its own shards
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultReduceScatter,  # private: what FSDP2 does by itself, which torch exports nowhere
)
from typing_extensions import override

from lightning_pipeoffload.odc.sharding import ShardedGroup
from lightning_pipeoffload.runtime.comm import (
    HostGroup,
    OwnerLocks,
    allocate_shared_memory,
    reporting_lost_peers,
)

_ALIGNMENT = 64
_MOST_PUSHES = 2  # whose gradients are whole at once


class OnDemandTransport(ABC):
    """Reads other ranks' shards from shared memory.

    Args:
        groups: The sharded groups, the same on every rank.
        rank: This rank among those that share the parameters.
        ranks: These ranks.
        device: The device of the parameters.
    """

    def __init__(
        self, groups: Sequence[ShardedGroup], rank: int, ranks: HostGroup, device: torch.device
    ) -> None:
        self._gathering = self._pushing = ""
        self._groups = groups
        self._rank = rank
        self._num_ranks = len(ranks.gather(rank))
        self._device = device
        spans = [(group.size, group.published) for group in groups]
        self._published = _shared_tensors(spans, rank, ranks, device)

    @property
    def running_action(self) -> str:
        """The gather or push that is going on, in words; else empty."""
        return self._gathering or self._pushing

    def publish(self) -> None:
        """Copy this rank's shards to shared memory; the caller waits for all ranks."""
        for group, target in zip(self._groups, self._published[self._rank], strict=True):
            for start, shard in group.local_shards():
                target[start : start + len(shard)].copy_(shard)
        self._wait_for_device()

    def gather(self, index: int, out: Tensor) -> None:
        """Read the other ranks' shards into ``out``, which contains this rank's own shard."""
        self._check(index, out.numel(), self._groups[index].size * self._num_ranks)
        shards = out.view(self._num_ranks, -1)
        for rank in _others_after(self._rank, self._num_ranks):
            self._gathering = f"the gather of {self._groups[index].name} from rank {rank}"
            shards[rank].copy_(self._published[rank][index])
        self._gathering = ""

    @abstractmethod
    def zero_gradient_sums(self) -> None:
        """Zero the sums of this rank's shards, before a minibatch."""

    @abstractmethod
    def accumulate(self, index: int, gradients: Tensor, parameters: Sequence[int]) -> None:
        """Add gradients to the sums of their owners.

        Args:
            index: The group.
            gradients: The gradients of some of its parameters, concatenated by owner.
            parameters: The indices of these parameters in the group.
        """

    @abstractmethod
    def wait(self) -> None:
        """Wait until this rank has added all its gradients."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the sums; every rank calls it when all have added their gradients."""

    @property
    @abstractmethod
    def _own_sums(self) -> Sequence[Tensor]:
        """The sums of this rank's shards, one for each group."""

    def gradient_sum(self, index: int, parameter: int) -> Tensor:
        """Return the sum of a parameter's gradients over all ranks, of this rank's padded shard."""
        ((target, _, length),) = self._spans(index, [parameter])
        return self._own_sums[index][target : target + length]

    def close(self) -> None:
        """Release other ranks' memory, threads and files."""
        self._published = []

    def _check(self, index: int, num_elements: int, expected: int) -> None:
        if num_elements != expected:
            raise RuntimeError(
                f"FSDP2 communicates {num_elements} elements of {self._groups[index].name}, and "
                f"{expected} were expected: extensions of what is gathered, and "
                f"reshard_after_forward=NUMBER, do not go with on-demand communication"
            )

    def _spans(self, index: int, parameters: Sequence[int]) -> list[tuple[int, int, int]]:
        """Return spans of gradients: start in the sum, start in the given gradients, and length."""
        group = self._groups[index]
        starts = dict(zip(group.trained, group.starts(group.trained), strict=True))
        offsets = group.starts(parameters)
        spans: list[tuple[int, int, int]] = []
        for parameter, start in zip(parameters, offsets, strict=True):
            size, target = group.sizes[parameter], starts[parameter]
            if spans and spans[-1][0] + spans[-1][2] == target:
                spans[-1] = (*spans[-1][:2], spans[-1][2] + size)
            else:
                spans.append((target, start, size))
        return spans

    def _wait_for_device(self) -> None:
        """Wait until other processes can read what was written."""
        if self._device.type != "cpu":
            torch.accelerator.current_stream().synchronize()


class SharedSums(OnDemandTransport):
    """Adds gradients to sums in shared memory, in order of arrival.

    A thread with a separate stream adds them: the backward continues while an owner's sum is
    locked, until the gradients of two groups wait.
    """

    def __init__(
        self, groups: Sequence[ShardedGroup], rank: int, ranks: HostGroup, device: torch.device
    ) -> None:
        super().__init__(groups, rank, ranks, device)
        spans = [(group.trained_size, group.summed) for group in groups]
        self._sums = _shared_tensors(spans, rank, ranks, device)
        self._locks = OwnerLocks(len(groups), rank, ranks)
        self._thread = ThreadPoolExecutor(1)
        self._pushes: deque[Future[None]] = deque()
        self._stream = None if device.type == "cpu" else torch.Stream(device)

    def zero_gradient_sums(self) -> None:
        for total in self._own_sums:
            total.zero_()

    def accumulate(self, index: int, gradients: Tensor, parameters: Sequence[int]) -> None:
        """Start to add gradients to each owner's sum, to this rank's own last.

        The caller must not change the gradients until :meth:`wait`.
        """
        group = self._groups[index]
        size = sum(group.sizes[parameter] for parameter in parameters)
        self._check(index, gradients.numel(), size * self._num_ranks)
        while len(self._pushes) >= _MOST_PUSHES:
            self._pushes.popleft().result()
        spans, parts = self._spans(index, parameters), gradients.view(self._num_ranks, -1)
        ready = None if self._stream is None else torch.accelerator.current_stream().record_event()
        self._pushes.append(self._thread.submit(self._push, index, parts, spans, ready))

    def _push(
        self,
        index: int,
        parts: Tensor,
        spans: Sequence[tuple[int, int, int]],
        ready: torch.Event | None,
    ) -> None:
        if self._pushing:
            return  # the push before has failed
        if ready is not None:
            ready.synchronize()  # before locking, so that others do not wait for a backward
        with torch.no_grad(), self._stream or nullcontext():
            for owner in (*_others_after(self._rank, self._num_ranks), self._rank):
                self._pushing = f"the push of {self._groups[index].name} to rank {owner}"
                total, part = self._sums[owner][index], parts[owner]
                with self._locks.hold_lock(owner, index):
                    for target, start, length in spans:
                        total[target : target + length] += part[start : start + length]
                    self._wait_for_device()  # before the next rank takes the lock
        self._pushing = ""

    @override
    def wait(self) -> None:
        while self._pushes:
            self._pushes.popleft().result()

    def finish(self) -> None:
        pass  # the sums are in this rank's memory

    def close(self) -> None:
        # This rank's sums stay in memory: gradients are views of them.
        self._thread.shutdown(cancel_futures=True)
        super().close()
        self._sums = []
        self._locks.close()

    @property
    def _own_sums(self) -> Sequence[Tensor]:
        return self._sums[self._rank]


class WholeGradients(OnDemandTransport):
    """Sums whole gradients on every rank, and reduces them once, always in the same order.

    Args:
        groups: This and the next three arguments are as in :class:`OnDemandTransport`.
        rank: This rank.
        ranks: The ranks.
        device: The device.
        reduction: The ranks' process group for the reduction, as in FSDP2.
    """

    def __init__(
        self,
        groups: Sequence[ShardedGroup],
        rank: int,
        ranks: HostGroup,
        device: torch.device,
        reduction: dist.ProcessGroup,
    ) -> None:
        super().__init__(groups, rank, ranks, device)
        self._reduction = reduction
        self._whole = [
            torch.zeros(self._num_ranks, group.trained_size, dtype=group.summed, device=device)
            for group in groups
        ]
        self._sums = [torch.zeros_like(whole[0]) for whole in self._whole]

    def zero_gradient_sums(self) -> None:
        for whole in self._whole:
            whole.zero_()

    def accumulate(self, index: int, gradients: Tensor, parameters: Sequence[int]) -> None:
        parts = gradients.view(self._num_ranks, -1)
        for target, start, length in self._spans(index, parameters):
            self._whole[index][:, target : target + length] += parts[:, start : start + length]

    @override
    def wait(self) -> None:
        pass  # gradients are added where they are given

    def finish(self) -> None:
        reduce_scatter = DefaultReduceScatter()
        with reporting_lost_peers("lost a rank while reducing gradients"):
            for whole, total in zip(self._whole, self._sums, strict=True):
                if total.numel():
                    reduce_scatter(total, whole.view(-1), self._reduction, dist.ReduceOp.SUM)

    @property
    def _own_sums(self) -> Sequence[Tensor]:
        return self._sums


def _others_after(rank: int, num_ranks: int) -> list[int]:
    """List the other ranks from the next one on, so that ranks start with different peers."""
    return [(rank + step) % num_ranks for step in range(1, num_ranks)]


def _shared_tensors(
    spans: Sequence[tuple[int, torch.dtype]], rank: int, ranks: HostGroup, device: torch.device
) -> list[list[Tensor]]:
    """Allocate shared tensors of these sizes and dtypes; return those of every rank."""
    sizes = [count * dtype.itemsize for count, dtype in spans]
    starts = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
    of_ranks = allocate_shared_memory(starts[-1], device, rank, ranks)
    pieces = [*zip(starts, sizes, (dtype for _, dtype in spans), strict=False)]
    return [[raw[at : at + size].view(dtype) for at, size, dtype in pieces] for raw in of_ranks]

"""What FSDP2 calls instead of its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import (
    AllGather,  # private, all three: what set_custom_all_gather takes, which torch exports nowhere
    ReduceScatter,
)

from lightning_pipeoffload.odc.sharded_group import ShardedGroup
from lightning_pipeoffload.odc.transport import OnDemandTransport


class OnDemandHooks:
    """Routes the communication of every group over a transport.

    Args:
        groups: What is sharded together.
        transport: What moves shards and gradients.

    Attributes:
        reached: The groups and places of the parameters that have had a gradient since ``open``.
    """

    def __init__(self, groups: Sequence[ShardedGroup], transport: OnDemandTransport) -> None:
        self.reached: set[tuple[int, int]] = set()
        self._groups = groups
        self._transport = transport
        self._waiting: list[set[int]] = [set() for _ in groups]
        self._handles: list[Any] = []
        for index, group in enumerate(groups):
            module = group.module
            module.set_custom_all_gather(_Gather(index, transport))
            module.set_custom_reduce_scatter(_Push(index, self))
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def watch(self) -> None:
        """See from now on which parameters get a gradient; shards have to be published."""
        for index, group in enumerate(self._groups):
            group.module.unshard()
            for place in group.trained:
                # Private: FSDP2 keeps this object, which autograd accumulates into.
                whole = group.members[place]._unsharded_param
                seen = self._waiting[index]
                hook = whole.register_post_accumulate_grad_hook
                self._handles.append(hook(lambda _, seen=seen, place=place: seen.add(place)))
            group.module.reshard()

    def push(self, index: int, gradients: Tensor) -> None:
        """Send the gradients that a backward has made of one group."""
        parameters = sorted(self._waiting[index])
        self._waiting[index].clear()
        self.reached.update((index, place) for place in parameters)
        self._transport.accumulate(index, gradients, parameters)

    def release(self) -> None:
        """Watch no longer."""
        while self._handles:
            self._handles.pop().remove()


def _empty(
    _: Any, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty(*size, dtype=dtype, device=device)


class _Gather(AllGather):
    allocate = _empty

    def __init__(self, index: int, transport: OnDemandTransport) -> None:
        self._index = index
        self._transport = transport

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        self._transport.gather(self._index, output_tensor)


class _Push(ReduceScatter):
    allocate = _empty

    def __init__(self, index: int, hooks: OnDemandHooks) -> None:
        self._index = index
        self._hooks = hooks

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._hooks.push(self._index, input_tensor)
        output_tensor.zero_()  # FSDP2 adds it to .grad, which is the sum's place after finish

"""Routes FSDP2's gathers and reductions over an on-demand transport."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,  # private, both: what FSDP2 does by itself, which torch exports nowhere
    DefaultReduceScatter,
)

from lightning_pipeoffload.odc.sharding import ShardedGroup
from lightning_pipeoffload.odc.transport import OnDemandTransport


class OnDemandHooks:
    """Routes the communication of every group over a transport, during steps.

    At other times, as in a hook after the optimizer's step, FSDP2's own collectives run: the
    published shards are outdated then.

    Attributes:
        reached: (group, parameter) indices of parameters with a gradient in this minibatch.
    """

    def __init__(self, groups: Sequence[ShardedGroup], transport: OnDemandTransport) -> None:
        self.reached: set[tuple[int, int]] = set()
        self._groups = groups
        self._transport: OnDemandTransport | None = transport
        self._is_on_demand = False
        self._waiting: list[set[int]] = [set() for _ in groups]
        self._handles: list[Any] = []
        for index, group in enumerate(groups):
            module = group.module
            module.set_custom_all_gather(_Gather(index, self))
            module.set_custom_reduce_scatter(_Push(index, self))
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    @property
    def transport(self) -> OnDemandTransport | None:
        """The transport of gathers and pushes; None: FSDP2's collectives."""
        return self._transport if self._is_on_demand else None

    @contextmanager
    def on_demand(self) -> Iterator[None]:
        """Within the context, the transport gathers parameters and pushes gradients, not FSDP2."""
        before, self._is_on_demand = self._is_on_demand, True
        try:
            yield
        finally:
            self._is_on_demand = before

    def record_reached_parameters(self) -> None:
        """Start to record the parameters that get a gradient; all ranks call it."""
        for index, group in enumerate(self._groups):
            group.module.unshard()
            for place in group.trained:
                # Private: FSDP2 keeps this object, which autograd accumulates into.
                whole = group.members[place]._unsharded_param
                seen = self._waiting[index]
                hook = whole.register_post_accumulate_grad_hook
                self._handles.append(hook(lambda _, seen=seen, place=place: seen.add(place)))
            group.module.reshard()

    def pop_reached(self, index: int) -> list[int]:
        """Return the parameters of a group that a backward has reached."""
        parameters = sorted(self._waiting[index])
        self._waiting[index].clear()
        self.reached.update((index, place) for place in parameters)
        return parameters

    def release(self) -> None:
        """Stop recording gradients, and release the transport."""
        while self._handles:
            self._handles.pop().remove()
        self._transport = None


class _Gather(DefaultAllGather):
    def __init__(self, index: int, hooks: OnDemandHooks) -> None:
        self._index = index
        self._hooks = hooks

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        transport = self._hooks.transport
        if transport is None:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        transport.gather(self._index, output_tensor)
        return None


class _Push(DefaultReduceScatter):
    def __init__(self, index: int, hooks: OnDemandHooks) -> None:
        self._index = index
        self._hooks = hooks

    def __call__(  # type: ignore[override] # FSDP2 takes None, as of a gather
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        transport, reached = self._hooks.transport, self._hooks.pop_reached(self._index)
        if transport is None:
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        transport.accumulate(self._index, input_tensor, reached)
        output_tensor.zero_()  # FSDP2 adds it to .grad, which becomes the sum after finish
        return None

"""One rank's minibatches: gathers of weights, gradients and buffers, and what cannot be trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeoffload.odc.fsdp_hooks import OnDemandHooks
from lightning_pipeoffload.odc.sharding import ShardedGroup, sharded_groups
from lightning_pipeoffload.odc.transport import OnDemandTransport
from lightning_pipeoffload.runtime.comm import HostGroup, reporting_lost_peers
from lightning_pipeoffload.runtime.shapes import local_part
from lightning_pipeoffload.runtime.weight_grad import has_hooks

MakeTransport = Callable[[Sequence[ShardedGroup]], OnDemandTransport]


class OnDemandRun:
    """Runs minibatches of a sharded module without collectives inside of them.

    All ranks wait for each other twice in a minibatch: before its first gather, in :meth:`open`,
    and after its last push, in :meth:`close`.

    Args:
        module: The module, sharded by FSDP2.
        world: All ranks.
        make_transport: A function that makes the transport; all ranks call it.
        replicas: The process group of the ranks that have the same shards on other machines; None
            on one machine.
    """

    def __init__(
        self,
        module: nn.Module,
        world: HostGroup,
        make_transport: MakeTransport,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self._module = module
        self._world = world
        self._make_transport = make_transport
        self._replicas = replicas
        self._connect()

    @property
    def running_action(self) -> str:
        """The gather or push that is going on, in words; else empty."""
        return self._transport.running_action

    def on_demand(self) -> AbstractContextManager[None]:
        """Gather and push on demand within the context; outside, FSDP2's collectives run."""
        return self._hooks.on_demand()

    def open(self, adds_up: bool) -> None:
        """Begin a minibatch with the current weights; all ranks wait for each other.

        Args:
            adds_up: Whether to add its gradients to those of the previous minibatch.
        """
        if not adds_up:
            self._start_sums()
        self.publish()
        self._versions = self._versions_now()
        self._buffers.open()

    def publish(self) -> None:
        """Publish the current weights for gathers; all ranks wait for each other."""
        self.reshard()
        self._transport.publish()
        self._world.barrier()

    def close(self, note: Any, is_last: bool) -> list[Any]:
        """End a minibatch; all ranks wait for each other.

        Args:
            note: An object for the other ranks.
            is_last: Whether the optimizer steps now, so that gradients are needed.

        Returns:
            The notes of all ranks.
        """
        self._refuse_written()
        self._wait()
        of_ranks = self._world.gather((note, self._hooks.reached, self._buffers.changed()))
        self._buffers.merge([changed for _, _, changed in of_ranks])
        if self._is_alone:  # FSDP2 communicates nothing, and the sums are in .grad
            return [note]
        self._drop_gradients()
        if is_last:
            self._transport.finish()
            self._set_gradients(set().union(*(reached for _, reached, _ in of_ranks)))
        return [note for note, _, _ in of_ranks]

    def reshard(self) -> None:
        """Reshard weights that a forward without a backward has left unsharded."""
        for group in self._groups:
            group.module.reshard()

    def reshard_and_wait(self) -> None:
        """Reshard for hooks and the optimizer; wait until no rank gathers any more."""
        self.reshard()
        self._wait()
        self._world.barrier()

    def end(self) -> None:
        """Restore FSDP2's communication, and close threads and files."""
        self._hooks.release()
        self._transport.close()

    def _connect(self) -> None:
        self._groups = sharded_groups(self._module)
        self._device = local_part(self._groups[0].parameters[0]).device
        self._is_alone = self._groups[0].num_ranks == 1
        self._transport = self._make_transport(self._groups)
        self._hooks = OnDemandHooks(self._groups, self._transport)
        self._hooks.record_reached_parameters()
        self._buffers = BufferSync(self._module, self._device)

    def _start_sums(self) -> None:
        if not all(group.is_up_to_date for group in self._groups):
            self.end()
            self._connect()
        for group in self._groups:
            refuse_gradient_hooks(zip(group.names, group.parameters, strict=True))
        self._drop_gradients()
        self._hooks.reached.clear()
        self._transport.zero_gradient_sums()

    def _wait(self) -> None:
        """Wait until this rank's device and its pushes have finished."""
        self._transport.wait()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _versions_now(self) -> dict[str, int]:
        pairs = (zip(group.names, group.parameters, strict=True) for group in self._groups)
        return {name: parameter._version for named in pairs for name, parameter in named}

    def _refuse_written(self) -> None:
        for name, version in self._versions_now().items():
            if version != self._versions[name]:
                raise ValueError(
                    f"training_step has changed {name}, and other ranks still read its value from "
                    f"before the minibatch; change it in a hook such as on_train_batch_end"
                )

    def _drop_gradients(self) -> None:
        for group in self._groups:
            for parameter in group.parameters:
                parameter.grad = None

    def _set_gradients(self, reached: set[tuple[int, int]]) -> None:
        for index, place in sorted(reached):
            parameter = self._groups[index].parameters[place]
            total = self._transport.gradient_sum(index, place)
            if self._replicas is not None:
                with reporting_lost_peers(
                    "lost a rank of another machine while adding gradients up"
                ):
                    dist.all_reduce(total, group=self._replicas)
            parameter.grad = _sharded_like(parameter, total)


def _sharded_like(parameter: nn.Parameter, total: Tensor) -> Tensor:
    """Return a view of the sum as this rank's shard of the parameter's gradient."""
    assert isinstance(parameter.data, DTensor)
    local = local_part(parameter.detach())
    shard = total[: local.numel()].view(local.shape).to(parameter.dtype)
    return DTensor.from_local(
        shard,
        parameter.data.device_mesh,
        parameter.data.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class BufferSync:
    """Synchronizes buffers that steps change, after each minibatch.

    For example, the running statistics of a BatchNorm depend on a rank's texts. All ranks get the
    value of the lowest rank that has changed a buffer, as of replica 0 in a pipeline. Buffers that
    are not persistent are mostly constants, and are not synchronized.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._device = device
        self._slots = {
            f"{path}.{key}": (part, key)
            for path, part in module.named_modules()
            for key in part._buffers
            # Private: the names of the non-persistent buffers.
            if key not in part._non_persistent_buffers_set
        }
        self._before = self._now()

    def open(self) -> None:
        """Record the versions of the buffers before a minibatch."""
        self._before = self._now()

    def changed(self) -> dict[str, Tensor]:
        """Return the buffers that this rank's steps have changed since, for other processes."""
        return {
            name: buffer.detach().cpu()
            for name, (buffer, version) in self._now().items()
            if not _is_same(self._before.get(name), buffer, version)
        }

    def merge(self, ranks: Sequence[Mapping[str, Tensor]]) -> None:
        """Copy the buffers that other ranks have changed, given those of each rank."""
        first = {name: value for rank in reversed(ranks) for name, value in rank.items()}
        for name, value in first.items():
            part, key = self._slots[name]
            buffer = part._buffers[key]
            if buffer is not None and buffer.shape == value.shape:
                buffer.detach().copy_(value)
            else:
                part._buffers[key] = value.to(self._device)

    def _now(self) -> dict[str, tuple[Tensor, int]]:
        buffers = {name: part._buffers.get(key) for name, (part, key) in self._slots.items()}
        return {
            name: (value, value._version) for name, value in buffers.items() if value is not None
        }


def _is_same(before: tuple[Tensor, int] | None, buffer: Tensor, version: int) -> bool:
    return before is not None and before[0] is buffer and before[1] == version


def check_run(module: LightningModule, trainer: Trainer) -> None:
    """Refuse modules and trainers that would give wrong results, or wait for ever."""
    refuse_gradient_hooks(module.named_parameters())
    for name, part in module.named_modules():
        _check_layer(name, part)
    # Private: nothing else says so.
    if trainer._accelerator_connector._layer_sync is not None:
        raise ValueError(
            "sync_batchnorm=True waits for all ranks in every microbatch; leave it out"
        )
    if trainer.state.fn == TrainerFn.FITTING:
        _check_fit(module, trainer)


def refuse_gradient_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse hooks that FSDP2 would drop, or that would get a gradient before it is summed."""
    for name, parameter in parameters:
        if has_hooks(parameter):
            raise ValueError(
                f"{name} has a hook on its gradient, which strategy='odc' sums up over the ranks "
                f"after the last backward, without calling hooks; change gradients in "
                f"on_before_optimizer_step, where they are whole"
            )


def _check_layer(name: str, part: nn.Module) -> None:
    if isinstance(part, nn.SyncBatchNorm):
        raise ValueError(
            f"{name} is a SyncBatchNorm, which waits for all ranks in every microbatch, and "
            f"ranks have different numbers of them; use a BatchNorm, or another norm"
        )
    if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
        raise ValueError(
            f"{name} makes sparse gradients, which FSDP2 does not shard; make it with sparse=False"
        )


def _check_fit(module: LightningModule, trainer: Trainer) -> None:
    if not module.automatic_optimization:
        raise ValueError(
            "manual optimization does not go with strategy='odc': training_step runs once for "
            "every microbatch, and ranks have different numbers of them; use automatic optimization"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "training_step(self, dataloader_iter) does not go with strategy='odc', which calls it "
            "for every microbatch of a batch; use training_step(self, batch, batch_idx)"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined] # set at run time
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} averages a copy of the module that was made before it "
                f"was sharded, and does not go with shards; keep averages of module.parameters(), "
                f"as they are in hooks, in a callback of your own: each rank averages its shards"
            )

"""Shards a user's module with FSDP2: each block by itself, and the rest around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from lightning_pipeoffload.runtime.cut.block_chain import find_chain
from lightning_pipeoffload.runtime.host_group import HostGroup
from lightning_pipeoffload.runtime.transport import blaming_peers

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 has sharded anything of a module."""
    return any(isinstance(part, FSDPModule) for part in module.modules())


def shard(
    module: nn.Module,
    blocks: str | Sequence[str] | None,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
) -> None:
    """Shard a module in place; its steps gather what they use of it.

    Args:
        module: The user's module.
        blocks: What is gathered apart: the name of a container, or patterns; None: found.
        mesh: The ranks that share the parameters.
        policy: The arithmetic.

    Raises:
        ValueError: There are no such blocks.
    """
    for block in _blocks_of(module, blocks):
        fully_shard(block, mesh=mesh, mp_policy=_explicit(policy, block))
    fully_shard(module, mesh=mesh, mp_policy=_explicit(policy, module))
    for step in _STEPS:
        if hasattr(module, step):
            register_fsdp_forward_method(module, step)


def share_initial_values(module: nn.Module, host: HostGroup) -> None:
    """Let every rank begin with global rank 0's values; without a seed they differ.

    Args:
        module: The module, not sharded yet.
        host: All ranks; what is on an accelerator goes over the default group.
    """
    tensors = {id(t): t.detach() for t in (*module.parameters(), *module.buffers())}
    with blaming_peers("lost a rank while sharing the initial weights"):
        for tensor in tensors.values():
            if not tensor.is_meta:
                group = host.host_group if tensor.device.type == "cpu" else None
                dist.broadcast(tensor, 0, group=group)


def _blocks_of(module: nn.Module, blocks: str | Sequence[str] | None) -> list[nn.Module]:
    """Return the blocks that have parameters, and share none with what is outside of them."""
    if blocks is None and not _has_containers(module):
        return []
    owners: dict[Tensor, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, set()).add(name)
    chain = find_chain(module, blocks)
    found = []
    for index, block in enumerate(chain.blocks):
        prefix = f"{chain.block_name(index)}."
        names = [owners[parameter] for parameter in block.parameters()]
        if names and all(name.startswith(prefix) for shared in names for name in shared):
            found.append(block)
    return found


def _has_containers(module: nn.Module) -> bool:
    return any(
        isinstance(part, nn.ModuleList | nn.Sequential)
        and sum(any(True for _ in entry.parameters()) for entry in part.children()) > 1
        for part in module.modules()
        if part is not module
    )


def _explicit(policy: MixedPrecisionPolicy, module: nn.Module) -> MixedPrecisionPolicy:
    """Say in which dtype gradients are summed: what None means depends on torch's version."""
    dtype = next((parameter.dtype for parameter in module.parameters()), None)
    return MixedPrecisionPolicy(
        policy.param_dtype,
        policy.reduce_dtype or policy.param_dtype or dtype,
        policy.output_dtype,
        policy.cast_forward_inputs,
    )

"""Tensor-parallel layers with local parameters, made from those of torch's ``parallelize_module``.

``parallelize_module`` turns the parameters of a layer into DTensors, and registers hooks: one
converts the layer's input to a DTensor, the other converts its output to a local tensor. This
module replaces the parameters with their local shards and the layer's ``forward`` with one that
computes with these. So optimizers, replicas, messages and memory estimates see plain tensors of
local sizes. DTensors exist only between the hooks and ``forward``. A linear layer::

    torch's hook    converts x to a DTensor with the placement that the layer needs
    forward         takes the local tensor of x
                    multiplies local tensors; the weight gradient is deferred to W as any other
                    returns a DTensor with the placement Shard or Partial
    torch's hook    redistributes it as the plan says, and returns the local tensor y

An embedding looks up its local rows or columns. Any other layer converts its local parameters to
DTensors during each call, and B computes its weight gradients. Those of torch's norms are left as
parts of a sum, which tensor ranks compute once a batch. A compiler traces the hooks and ``forward``
together, and compiles their DTensors to local tensors and collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_pipeoffload.runtime.compiled import warn_once
from lightning_pipeoffload.runtime.shapes import (
    OF_SHARD,
    ShapeOnly,
    Sharding,
    is_shard,
    local_part,
    register_sharding_hooks,
    set_sharding,
    storage_of,
)
from lightning_pipeoffload.runtime.tensor_parallel.shard_initialization import initializing_shards
from lightning_pipeoffload.runtime.users_code import Slot, find_slots

_PARTED = (
    "the plan of parallelize_module divides a weight that two layers have, and {} is another "
    "weight from now on, which trains by itself; leave both layers out of the plan"
)
INSTEAD = (
    "PipeOffloadStrategy's sharding=\"optimizer\" and recompute, and the Trainer's precision, do "
    "what it does"
)
"""What replaces ``fully_shard``."""


class NothingDistributedError(ValueError):
    """``configure_model`` distributes no layer over the tensor ranks."""


@contextmanager
def sharding_layers(module: nn.Module, mesh: DeviceMesh) -> Iterator[None]:
    """Have tensor ranks share the layers that are made, drawn and parallelized within the context.

    Args:
        module: The module that has the layers.
        mesh: The mesh of all processes, with the dimension ``tensor_parallel``.

    Raises:
        ValueError: As :func:`replace_dtensors`.
    """
    with initializing_shards(module), _warning_of_untied_weights(module, mesh.get_rank()):
        yield
    replace_dtensors(module, mesh["tensor_parallel"])


@contextmanager
def _warning_of_untied_weights(module: nn.Module, global_rank: int) -> Iterator[None]:
    """Warn if a plan divides a weight under one of its names only, or under each apart."""
    divided: list[ReferenceType[Tensor]] = []
    parted: list[Any] = []

    def note(layer: nn.Module, name: str, parameter: Any) -> None:
        before = dict(layer.named_parameters(recurse=False)).get(name)
        if before is not None and isinstance(parameter, DTensor):
            if any(reference() is before for reference in divided):
                parted.append(parameter)
            divided.append(ref(before))

    with register_module_parameter_registration_hook(note):
        yield
    other = {id(tensor) for tensor in (*parted, *(reference() for reference in divided))}
    names = [slot.name for slot in find_slots(module) if id(slot.tensor) in other]
    if names and not global_rank:
        warn_once(_PARTED.format(", ".join(names)))


def replace_dtensors(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replace a module's DTensors with their local tensors, which its layers compute with.

    Args:
        module: The user's module, whose layers ``parallelize_module`` has distributed.
        mesh: The tensor ranks.

    Raises:
        ValueError: A layer is distributed in a way that is not supported.
    """
    locals_by_id: dict[int, Tensor] = {}
    layers: dict[int, tuple[nn.Module, str, dict[str, Sharding]]] = {}
    for slot in find_slots(module):
        if not isinstance(slot.tensor, DTensor):
            continue
        sharding = _sharding_of(slot.name, slot.tensor, mesh)
        local = locals_by_id.setdefault(id(slot.tensor), _local_of(slot, sharding))
        slot.put(local)
        name = slot.name.rpartition(".")[0]
        _, _, shardings = layers.setdefault(id(slot.module), (slot.module, name, {}))
        shardings[slot.attribute] = sharding
    if not layers and not any(map(is_shard, module.parameters())):
        raise NothingDistributedError(
            f"configure_model distributes no layer over tensor_parallel_size={mesh.size()} ranks, "
            f"which would all compute the same; call torch's parallelize_module there with "
            f'self.device_mesh["tensor_parallel"] and a plan, or leave tensor_parallel_size out'
        )
    for layer, name, shardings in layers.values():
        if "forward" in vars(layer):
            raise ValueError(
                f"{name} has a forward that was assigned to it, and tensor ranks share layers by "
                f"the forward of their class; leave the layer out of the plan, or give it a class"
            )
        share = _find_forward_replacer(layer, shardings)
        share(layer, module, shardings)
        register_sharding_hooks(layer, shardings)


def _sharding_of(name: str, tensor: DTensor, mesh: DeviceMesh) -> Sharding:
    if tensor.device_mesh != mesh:
        raise ValueError(
            f"{name} is distributed over {tensor.device_mesh}, and a pipeline's layers are shared "
            f'over self.device_mesh["tensor_parallel"] only: leave fully_shard out, or under '
            f'`if self.device_mesh["data_parallel"].size() > 1`; {INSTEAD}'
        )
    (placement,) = tensor.placements
    if isinstance(placement, Shard) and tensor.shape[placement.dim] % mesh.size():
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} cannot be shared in equal parts by "
            f"tensor_parallel_size={mesh.size()} along dimension {placement.dim}; leave its layer "
            f"out of the plan, or choose a size that divides {tensor.shape[placement.dim]}"
        )
    if type(placement) not in (Shard, Replicate):
        raise ValueError(
            f"{name} is placed as {placement}, which is not supported; use Shard or Replicate"
        )
    return Sharding(mesh, placement, tensor.shape, tensor.stride())


@torch.no_grad()
def _local_of(slot: Slot, sharding: Sharding) -> Tensor:
    dtensor: Any = slot.tensor
    local = local_part(dtensor).detach()
    if storage_of(local).nbytes() > local.nbytes:  # a view of the whole
        local = local.clone()
    if slot.kind == "_parameters":
        local = nn.Parameter(local, dtensor.requires_grad)
    set_sharding(local, sharding)
    return local


def _find_forward_replacer(
    layer: nn.Module, shardings: Mapping[str, Sharding]
) -> Callable[[nn.Module, nn.Module, Mapping[str, Sharding]], None]:
    weight = shardings.get("weight")
    if weight is not None and weight.is_divided:
        if type(layer).forward is nn.Linear.forward:
            return _replace_linear_forward
        if type(layer).forward is nn.Embedding.forward:
            return _replace_embedding_forward
    return _replace_other_forward


# Linear layers


def _replace_linear_forward(
    layer: nn.Module, module: nn.Module, shardings: Mapping[str, Sharding]
) -> None:
    mesh, of_weight = shardings["weight"].mesh, shardings["weight"].placement
    by_rows = of_weight.is_shard(0)  # each rank has some of the outputs, else of the inputs
    is_first = mesh.get_local_rank() == 0

    def forward(layer: Any, x: Any) -> DTensor:
        last = x.dim() - 1
        wanted = Replicate() if by_rows else Shard(last)
        _check_input(x, wanted, mesh, layer, module)
        if by_rows:
            y = functional.linear(x.to_local(grad_placements=[Partial()]), layer.weight, layer.bias)
            return DTensor.from_local(y, mesh, [Shard(last)], run_check=False)
        y = functional.linear(x.to_local(grad_placements=[wanted]), layer.weight)
        if layer.bias is not None:  # one rank adds it, and all have its gradient
            y = y + (layer.bias - layer.bias.detach() * (not is_first))
        return DTensor.from_local(y, mesh, [Partial()], run_check=False)

    layer.forward = MethodType(forward, layer)


def _check_input(
    x: Any, wanted: Placement, mesh: DeviceMesh, layer: nn.Module, module: nn.Module
) -> None:
    if not isinstance(x, DTensor):
        raise ValueError(
            f"{_name_in(module, layer)} is distributed and gets a tensor that is not; name it in "
            f"the plan of parallelize_module, whose styles distribute its input"
        )
    if x.device_mesh != mesh or x.placements != (wanted,):
        raise ValueError(
            f"{_name_in(module, layer)} gets an input placed as {x.placements}, and with this "
            f"weight it is built for {wanted}; set desired_input_layouts, or leave the layer out "
            f"of the plan"
        )


def _name_in(module: nn.Module, layer: nn.Module) -> str:
    """Return the layer's name, which no ``forward`` keeps: blocks with such layers are alike."""
    return next(name for name, child in module.named_modules() if child is layer)


# Embeddings


def _replace_embedding_forward(
    layer: nn.Module, module: nn.Module, shardings: Mapping[str, Sharding]
) -> None:
    sharding = shardings["weight"]
    mesh, by_rows = sharding.mesh, sharding.placement.is_shard(0)
    embedding: Any = layer
    if by_rows and (embedding.padding_idx is not None or embedding.max_norm is not None):
        raise ValueError(
            f"{_name_in(module, layer)} has padding_idx or max_norm, which is not supported with "
            f"its rows on several tensor ranks; use ColwiseParallel, whose ranks have columns, or "
            f"leave it out"
        )
    num_rows = sharding.shape[0] // mesh.size()
    first = mesh.get_local_rank() * num_rows
    look_up = type(layer).forward

    def forward(layer: Any, x: Any) -> DTensor:
        _check_input(x, Replicate(), mesh, layer, module)
        indices = x.to_local()
        if not by_rows:
            y = look_up(layer, indices)
            return DTensor.from_local(y, mesh, [Shard(y.dim() - 1)], run_check=False)
        indices = indices - first
        absent = (indices < 0) | (indices >= num_rows)  # rows of other ranks
        y = look_up(layer, indices.masked_fill(absent, 0)).masked_fill(absent.unsqueeze(-1), 0)
        return DTensor.from_local(y, mesh, [Partial()], run_check=False)

    layer.forward = MethodType(forward, layer)


# Others


def _replace_other_forward(
    layer: nn.Module, module: nn.Module, shardings: Mapping[str, Sharding]
) -> None:
    run = type(layer).forward
    if run in (nn.LayerNorm.forward, nn.RMSNorm.forward):  # whose gradients are never divided
        shardings = {
            attribute: sharding._replace(has_partial_gradient=True)
            for attribute, sharding in shardings.items()
        }
        for attribute, sharding in shardings.items():
            set_sharding(getattr(layer, attribute), sharding)

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        kept: list[tuple[dict[str, Any], str, Tensor]] = []
        # Not swapped() of slots: a compiler traces this.
        registries: tuple[dict[str, Any], ...] = layer._parameters, layer._buffers
        try:
            for tensors in registries:
                for attribute, sharding in shardings.items():
                    local = tensors.get(attribute)
                    if local is not None:
                        kept.append((tensors, attribute, local))
                        tensors[attribute] = _as_dtensor(local, sharding)
            return run(layer, *args, **kwargs)
        finally:
            for tensors, attribute, local in kept:
                tensors[attribute] = local

    layer.forward = MethodType(forward, layer)


def _as_dtensor(local: Tensor, sharding: Sharding) -> Any:
    dtensor: Any = DTensor.from_local(
        local, sharding.mesh, [sharding.placement], run_check=False,
        shape=sharding.shape, stride=sharding.stride,
        grad_placements=[Partial()] if sharding.has_partial_gradient else None,
    )  # fmt: skip
    if isinstance(local, ShapeOnly):  # its gradient is summed
        dtensor._local_tensor.origins |= OF_SHARD
    return dtensor

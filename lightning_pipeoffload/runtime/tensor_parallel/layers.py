"""Layers of which each tensor rank has a part, as torch's ``parallelize_module`` makes them.

It leaves DTensors as parameters, and hooks that make a DTensor of a layer's input and a local
tensor of its result. A layer here has local tensors as parameters, and DTensors are between its
hooks only, so that optimizers, replicas, messages and memory see plain tensors, of local sizes. Not
even the product of a linear layer is one of DTensors::

    torch's hook    x to a DTensor, placed as the layer needs it
    ours            to the local tensor
    linear          a product of local tensors, whose weight gradient waits for W as any other
    ours            to a DTensor: a shard, or a part of a sum
    torch's hook    placed as the plan says, to the local tensor y

An embedding looks its own rows or columns up. Any other layer makes DTensors of its local
parameters where it is called, and its gradients are there in B.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.shapes.sharding import (
    OF_SHARD,
    Sharding,
    is_shard,
    set_sharding,
)
from lightning_pipeoffload.runtime.users_code.tensor_slots import Slot, find_slots

INSTEAD = (
    "PipeOffloadStrategy's sharding=\"optimizer\" and recompute, and the Trainer's precision, do "
    "what it does"
)
"""What replaces ``fully_shard``."""


def keep_local_parts(module: nn.Module, mesh: DeviceMesh) -> None:
    """Replace a module's DTensors with their local tensors, which its layers compute with.

    Args:
        module: The user's module, whose layers ``parallelize_module`` has distributed.
        mesh: The tensor ranks.

    Raises:
        ValueError: A layer is distributed in a way that is not supported.
    """
    made: dict[int, Tensor] = {}
    layers: dict[int, tuple[nn.Module, str, dict[str, Sharding]]] = {}
    for slot in find_slots(module):
        if not isinstance(slot.tensor, DTensor):
            continue
        sharding = _sharding_of(slot.name, slot.tensor, mesh)
        local = made.setdefault(id(slot.tensor), _local_of(slot, sharding))
        slot.put(local)
        name = slot.name.rpartition(".")[0]
        _, _, shardings = layers.setdefault(id(slot.module), (slot.module, name, {}))
        shardings[slot.attribute] = sharding
    if not layers and not any(map(is_shard, module.parameters())):
        raise ValueError(
            f"configure_model distributes no layer over tensor_parallel_size={mesh.size()} ranks, "
            f"which would all compute the same; call torch's parallelize_module there with "
            f'self.device_mesh["tensor_parallel"] and a plan, or leave tensor_parallel_size out'
        )
    for layer, name, shardings in layers.values():
        share = _find_share(layer, shardings)
        share(layer, name, shardings)


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
    local = dtensor.to_local().detach()
    if local.untyped_storage().nbytes() > local.nbytes:  # a view of the whole
        local = local.clone()
    if slot.kind == "_parameters":
        local = nn.Parameter(local, dtensor.requires_grad)
    set_sharding(local, sharding)
    return local


def _find_share(layer: nn.Module, shardings: Mapping[str, Sharding]) -> Callable[..., None]:
    weight = shardings.get("weight")
    if weight is not None and weight.is_divided:
        if type(layer).forward is nn.Linear.forward:
            return _share_linear
        if type(layer).forward is nn.Embedding.forward:
            return _share_embedding
    return _share_other


# Linear layers


def _share_linear(layer: nn.Module, name: str, shardings: Mapping[str, Sharding]) -> None:
    mesh, of_weight = shardings["weight"].mesh, shardings["weight"].placement
    by_rows = of_weight.is_shard(0)  # each rank has some of the outputs, else of the inputs
    bias: list[Any] = []  # while the layer runs without it

    def bias_of(layer: nn.Module) -> Slot:
        return Slot(f"{name}.bias", layer, "bias", "_parameters")

    def enter(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        (x,) = args
        wanted = Replicate() if by_rows else Shard(x.dim() - 1)
        _check_input(x, wanted, mesh, name)
        if not by_rows:
            bias.append(bias_of(layer).tensor)
            bias_of(layer).put(None)
        gradient = Partial() if by_rows else wanted
        return (x.to_local(grad_placements=[gradient]),)

    def leave(layer: nn.Module, args: Any, y: Tensor) -> Any:
        of_sum = bias.pop() if bias else None
        if not by_rows:
            bias_of(layer).put(of_sum)
        if y is None:  # after an error
            return None
        if of_sum is not None:
            y = _AddedOnce.apply(y, of_sum, mesh.get_local_rank() == 0)
        placement = Shard(y.dim() - 1) if by_rows else Partial()
        return DTensor.from_local(y, mesh, [placement], run_check=False)

    _hook(layer, enter, leave)


class _AddedOnce(torch.autograd.Function):
    """Adds the bias to one of the parts of a sum; each rank gets the gradient of all of it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, is_here: bool) -> Tensor:
        return y + (bias if is_here else torch.zeros_like(bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, grad.sum([*range(grad.dim() - 1)]), None  # of a sum, which all ranks have


def _check_input(x: Any, wanted: Placement, mesh: DeviceMesh, name: str) -> None:
    if not isinstance(x, DTensor):
        raise ValueError(
            f"{name} is distributed and gets a tensor that is not; name it in the plan of "
            f"parallelize_module, whose styles distribute its input"
        )
    if x.device_mesh != mesh or x.placements != (wanted,):
        raise ValueError(
            f"{name} gets an input placed as {x.placements}, and with this weight it is built for "
            f"{wanted}; set desired_input_layouts, or leave the layer out of the plan"
        )


# Embeddings


def _share_embedding(layer: nn.Module, name: str, shardings: Mapping[str, Sharding]) -> None:
    sharding = shardings["weight"]
    mesh, by_rows = sharding.mesh, sharding.placement.is_shard(0)
    embedding: Any = layer
    if by_rows and (embedding.padding_idx is not None or embedding.max_norm is not None):
        raise ValueError(
            f"{name} has padding_idx or max_norm, which is not supported with its rows on several "
            f"tensor ranks; use ColwiseParallel, whose ranks have columns, or leave it out"
        )
    num_rows = sharding.shape[0] // mesh.size()
    absent: list[Tensor] = []  # while the layer runs: the places of other ranks' rows

    def enter(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        (x,) = args
        _check_input(x, Replicate(), mesh, name)
        indices = x.to_local()
        if by_rows:
            indices = indices - mesh.get_local_rank() * num_rows
            absent.append((indices < 0) | (indices >= num_rows))
            indices = indices.masked_fill(absent[-1], 0)
        return (indices,)

    def leave(layer: nn.Module, args: Any, y: Tensor) -> Any:
        places = absent.pop() if absent else None
        if y is None:  # after an error
            return None
        if places is not None:
            y = y.masked_fill(places.unsqueeze(-1), 0)
        placement = Partial() if by_rows else Shard(y.dim() - 1)
        return DTensor.from_local(y, mesh, [placement], run_check=False)

    _hook(layer, enter, leave)


# Others


def _share_other(layer: nn.Module, name: str, shardings: Mapping[str, Sharding]) -> None:
    kept: list[tuple[Slot, Tensor]] = []

    def enter(layer: nn.Module, args: tuple[Any, ...]) -> None:
        for slot in _filled_slots(layer, shardings):
            sharding, tensor = shardings[slot.attribute], slot.tensor
            kept.append((slot, tensor))
            made = DTensor.from_local(
                tensor, sharding.mesh, [sharding.placement],
                run_check=False, shape=sharding.shape, stride=sharding.stride,
            )  # fmt: skip
            slot.put(made)
            if isinstance(made._local_tensor, ShapeOnly):  # its gradient is summed
                made._local_tensor.origins |= OF_SHARD

    def leave(layer: nn.Module, args: Any, result: Any) -> None:
        while kept:
            slot, tensor = kept.pop()
            slot.put(tensor)

    _hook(layer, enter, leave)


def _filled_slots(layer: nn.Module, names: Container[str]) -> Iterator[Slot]:
    for kind in ("_parameters", "_buffers"):
        for name, tensor in layer.__dict__[kind].items():
            if name in names and tensor is not None:
                yield Slot(name, layer, name, kind)


def _hook(layer: nn.Module, enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
    """Call ``enter`` after torch's hook before a layer, and ``leave`` before that behind it."""
    layer.register_forward_pre_hook(enter)
    layer.register_forward_hook(leave, prepend=True, always_call=True)

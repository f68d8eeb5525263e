"""How parameters and buffers are sharded over the tensor ranks, which share a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from lightning_pipeoffload.runtime import value_of
from lightning_pipeoffload.runtime.users_code import in_brackets, running_user_line

TENSOR_RANKS = ("tensor_parallel",)
"""The names of the dimensions of a mesh of tensor ranks."""

_SHARDING = "_pipeoffload_sharding"

OF_SHARD = frozenset(("a shard",))
"""Added to the ``origins`` of a shape-only tensor whose value differs between tensor ranks."""


class Sharding(NamedTuple):
    """How tensor ranks share a tensor.

    Attributes:
        mesh: The tensor ranks.
        placement: ``Shard`` or ``Replicate``, on each tensor rank.
        shape: The shape of the whole tensor.
        stride: The strides of the whole tensor.
        has_partial_gradient: Whether the gradient is the sum of those of all tensor ranks, which
            is computed once a batch.
    """

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size
    stride: tuple[int, ...]
    has_partial_gradient: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        return self  # a copied state dict is of the same ranks

    def __reduce__(self) -> Any:
        raise RuntimeError(
            "a state dict of a module with tensor_parallel_size above 1 has shards of weights, of "
            "which other ranks have the rest; save it with trainer.save_checkpoint(path), or what "
            "trainer.strategy.gather(parameter) returns, which all ranks call"
        )

    @property
    def is_divided(self) -> bool:
        """Whether each tensor rank has only a shard of the elements."""
        return isinstance(self.placement, Shard)

    def local_shard_of(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of the whole tensor, a view."""
        if not isinstance(self.placement, Shard):
            return whole
        return whole.chunk(self.mesh.size(), self.placement.dim)[self.mesh.get_local_rank()]

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Return the whole tensor, from the shards of all tensor ranks."""
        assert isinstance(self.placement, Shard)
        return torch.cat(parts, self.placement.dim)


def set_sharding(tensor: Tensor, sharding: Sharding) -> None:
    """Record how tensor ranks share a tensor, whose local shard is ``tensor``."""
    setattr(tensor, _SHARDING, sharding)


def sharding_of(tensor: Tensor) -> Sharding | None:
    """Return how tensor ranks share a parameter or buffer; None if no plan names its layer."""
    if isinstance(tensor, DTensor) and len(tensor.placements) == 1:
        return Sharding(tensor.device_mesh, *tensor.placements, tensor.shape, tensor.stride())
    sharding: Sharding | None = getattr(tensor, _SHARDING, None)
    return sharding


def register_sharding_hooks(layer: nn.Module, shardings: Mapping[str, Sharding]) -> None:
    """Have the layer's state dicts record which tensors are shards, and load the whole of them.

    Deep copies of the layer do so too.

    Args:
        layer: A layer whose tensors are local parts.
        shardings: How tensor ranks share them, by attribute.
    """
    shardings = {attribute: each for attribute, each in shardings.items() if each.is_divided}

    def record(layer: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for attribute, sharding in shardings.items():
            if isinstance(state.get(prefix + attribute), Tensor):
                set_sharding(state[prefix + attribute], sharding)

    def keep_own_part(layer: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for attribute, sharding in shardings.items():
            loaded = state.get(prefix + attribute)
            if isinstance(loaded, Tensor) and loaded.shape == sharding.shape:
                state[prefix + attribute] = sharding.local_shard_of(value_of(loaded))

    layer.register_state_dict_post_hook(record)
    layer.register_load_state_dict_pre_hook(keep_own_part)


def is_shard(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a shard: other tensor ranks have other elements of the whole."""
    sharding = sharding_of(tensor)
    return sharding is not None and sharding.is_divided


def has_partial_gradient(tensor: Tensor) -> bool:
    """Whether tensor ranks sum their gradients of a parameter, once a batch."""
    sharding = sharding_of(tensor)
    return sharding is not None and sharding.has_partial_gradient


def local_part(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor; another tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    local: Tensor = tensor._local_tensor  # private: to_local() is an operation, a view
    return local


def refuse_dtensor(value: Any, block: str, verb: str) -> None:
    """Raise ``ValueError`` for a DTensor that a block "gets" or "returns", the ``verb``."""
    if isinstance(value, DTensor):
        raise ValueError(
            f"{block} {verb} a DTensor, and what goes from one stage to another is a plain tensor; "
            f"set use_local_output=True in the plan of parallelize_module"
        )


def unwrap_replicated(value: Any) -> Any:
    """Return the local tensor of a replicated DTensor, such as loss_parallel's; else ``value``.

    Raises:
        ValueError: The DTensor is sharded or partial, so tensor ranks have different values.
    """
    if not isinstance(value, DTensor) or value.device_mesh.mesh_dim_names != TENSOR_RANKS:
        return value
    if not all(placement.is_replicate() for placement in value.placements):
        raise ValueError(
            f"the step returns or logs a DTensor placed as {value.placements}, of which tensor "
            f"ranks have different parts; use value.full_tensor()"
        )
    return value.to_local()


def refuse_loss_of_shard(loss: Any) -> None:
    """Raise ``ValueError`` for a loss that each tensor rank would compute from its shard alone."""
    if getattr(loss, "origins", frozenset()) >= OF_SHARD:
        raise ValueError(
            "the loss is computed from a shard of a layer, and tensor ranks would have different "
            "ones; have all of the layer's result on each, with output_layouts=Replicate() in the "
            "plan of parallelize_module, and read no weight of the plan outside of its layer"
        )


def refuse_weight_on_shard(tensors: Sequence[Tensor], are_weights: Sequence[bool]) -> None:
    """Raise ``ValueError`` if an operation combines a replicated weight with a shard.

    Each tensor rank would compute only its shard's part of the weight's gradient.

    Args:
        tensors: The operands of the operation.
        are_weights: For each operand, whether it is a parameter.
    """
    origins: list[frozenset[str]] = [getattr(each, "origins", frozenset()) for each in tensors]
    if not any(each >= OF_SHARD for each in origins):
        return
    for tensor, of_tensor, is_weight in zip(tensors, origins, are_weights, strict=True):
        if is_weight and tensor.requires_grad and not of_tensor >= OF_SHARD:
            raise ValueError(
                f"{', '.join(sorted(of_tensor))} is in no plan of parallelize_module and is used"
                f"{in_brackets(running_user_line())} on a shard, so that tensor ranks would have "
                f"different gradients of it; name its layer in the plan, or freeze it"
            )

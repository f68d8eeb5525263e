"""Random initial values of shards, equal to the slices of the values that one device draws.

Code that initializes weights after ``parallelize_module``, or in a hook, draws into shards here.
Tensor ranks have the same generators, and their shards would be equal. So each rank draws the whole
tensor and keeps its own shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import init

from lightning_pipeoffload.runtime import replaced
from lightning_pipeoffload.runtime.shapes import (
    DRAWS_BY_SHAPE,
    ShapeOnly,
    Sharding,
    is_in_step,
    local_part,
    sharding_of,
    storage_key,
)

_DRAWS = [op.__name__ for op in DRAWS_BY_SHAPE if op.__name__.endswith("_")]  # of Tensor

_modules: WeakSet[nn.Module] = WeakSet()  # those with shards


@contextmanager
def initializing_shards(module: nn.Module | None = None) -> Iterator[None]:
    """Within the context, draw whole tensors for random writes into modules' shards.

    Args:
        module: A module with shards; None: those of all earlier calls.
    """
    if module is not None:
        _modules.add(module)
    with ExitStack() as stack:
        for name in _DRAWS:
            by_whole = _replacement(_draw_whole, getattr(Tensor, name))
            stack.enter_context(replaced(Tensor, name, by_whole))
        for name, by in _OF_INIT.items():
            stack.enter_context(replaced(init, name, _replacement(by, getattr(init, name))))
        yield


def _replacement(by: Any, function: Any) -> Callable[..., Any]:
    @wraps(function)
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return by(function, tensor, *args, **kwargs)

    return call


def _find_sharding(tensor: Tensor) -> Sharding | None:
    """Return how a tensor is divided of which a weight, or its ``data``, is this rank's part."""
    sharding = sharding_of(tensor)
    if sharding is None:
        return _sharding_by_memory(tensor)
    return sharding if sharding.is_divided or isinstance(tensor, DTensor) else None


def _sharding_by_memory(tensor: Tensor) -> Sharding | None:
    if is_in_step():  # in which no weights are drawn
        return None
    for weight in (weight for module in _modules for weight in module.parameters()):
        sharding = sharding_of(weight)
        if (
            sharding is None
            or not sharding.is_divided
            or storage_key(weight) != storage_key(tensor)
        ):
            continue
        if weight.shape != tensor.shape:
            raise ValueError(
                f"values of shape {tuple(tensor.shape)} are drawn into a part of a weight of shape "
                f"{tuple(sharding.shape)}, of which each tensor rank has {tuple(weight.shape)}; "
                f"draw into all of it, or initialize weights before parallelize_module"
            )
        return sharding
    return None


def _draw_whole(draw: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    sharding = None if tensor.is_meta else _find_sharding(tensor)
    if sharding is None:
        return draw(tensor, *args, **kwargs)
    whole = torch.empty(sharding.shape, dtype=tensor.dtype, device=tensor.device)
    draw(whole, *args, **kwargs)
    local = local_part(tensor)
    with torch.no_grad():
        if isinstance(local, ShapeOnly):
            local.zero_()  # a write, for observers
        else:
            local.copy_(sharding.local_shard_of(whole))
    return tensor


def _fans_of_whole(fans: Callable[..., Any], tensor: Tensor) -> Any:
    sharding = _find_sharding(tensor)
    return fans(tensor if sharding is None else torch.empty(sharding.shape, device="meta"))


def _refuse_shards(fill: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(tensor, DTensor) and _find_sharding(tensor) is not None:
        raise ValueError(
            f"{fill.__name__} fills a weight by its rows and columns, of which each tensor rank "
            f"has some; initialize weights before parallelize_module"
        )
    return fill(tensor, *args, **kwargs)


_OF_INIT = {
    # Private: trunc_normal_ calls it.
    "_no_grad_trunc_normal_": _draw_whole,
    # Private: Linear.reset_parameters calls it, and other functions of init.
    "_calculate_fan_in_and_fan_out": _fans_of_whole,
    # They depend on all rows and columns.
    **dict.fromkeys(("orthogonal_", "sparse_", "eye_", "dirac_"), _refuse_shards),
}

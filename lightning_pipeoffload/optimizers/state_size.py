"""What an optimizer keeps for its parameters, in bytes: seen after a step on shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeoffload.optimizers.copy import NotRebuiltError, optimizer_like
from lightning_pipeoffload.optimizers.trial import without_trace
from lightning_pipeoffload.runtime.leaves import leaves_of

# Where a step needs values: a matrix, of which an optimizer keeps so much for each element.
_TRIED_SHAPE = torch.Size((64, 64))
_META = torch.device("meta")

_Kind = tuple[torch.Size, torch.dtype]


def measure_states(optimizers: Iterable[Any], num_sharing: int = 1) -> dict[int, int]:
    """Return the bytes that optimizers will keep for each parameter, by its id.

    Nothing is changed: others like them take a step, on shapes, or on small tensors where that
    needs values.

    Args:
        optimizers: The user's optimizers.
        num_sharing: The number of replicas that share out what they keep.

    Raises:
        NotRebuiltError: There is no making another optimizer like one of them.
    """
    found: dict[int, int] = {}
    for optimizer in optimizers:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        kinds = {(p.shape, p.dtype): 0 for p in parameters if p.requires_grad}
        sizes = _sizes_of(optimizer, kinds) if kinds else {}
        for p in parameters:
            size = sizes[p.shape, p.dtype] if p.requires_grad else 0
            found[id(p)] = -(-size // num_sharing)
    return found


def _sizes_of(optimizer: Any, kinds: Iterable[_Kind]) -> Mapping[_Kind, int]:
    with without_trace():
        try:
            return {kind: _state_bytes(optimizer, kind, _META) for kind in kinds}
        except NotRebuiltError:
            raise
        except Exception:  # of whatever kind: meta tensors have no values, nor all kernels
            return {kind: _in_proportion(optimizer, kind) for kind in kinds}


def _in_proportion(optimizer: Any, kind: _Kind) -> int:
    shape, dtype = kind
    tried = _state_bytes(optimizer, (_TRIED_SHAPE, dtype), torch.device("cpu"))
    return tried * shape.numel() // _TRIED_SHAPE.numel()


def _state_bytes(optimizer: Any, kind: _Kind, device: torch.device) -> int:
    """Return what an optimizer like this one keeps after a step on one tensor in each group."""
    shape, dtype = kind
    made: list[nn.Parameter] = []

    def make_members(_: torch.dtype) -> list[nn.Parameter]:
        made.append(nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)))
        return made[-1:]

    other = optimizer_like(optimizer, make_members)
    for parameter in made:
        parameter.grad = torch.zeros_like(parameter)
    other.step(closure=lambda: torch.zeros(()))
    return max(_bytes_in(other.state.get(parameter)) for parameter in made)


def _bytes_in(state: Any) -> int:
    return sum(leaf.nbytes for leaf in leaves_of(state) if isinstance(leaf, Tensor))

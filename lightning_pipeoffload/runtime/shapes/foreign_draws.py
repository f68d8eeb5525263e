"""Random numbers for what another stage has: drawn as there, and dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map  # private: see runtime/leaves

aten = torch.ops.aten

# How many numbers these draw depends on the shape alone.
_BY_SHAPE = {
    aten.bernoulli_, aten.cauchy_, aten.exponential_, aten.geometric_, aten.log_normal_,
    aten.normal_, aten.random_, aten.uniform_, aten.bernoulli, aten.normal,
}  # fmt: skip


def advance_generator(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> None:
    """Draw what the owner draws, so that what is drawn next is the same on every stage."""
    if func.overloadpacket is aten.native_dropout:
        torch.empty(args[0].shape, dtype=args[0].dtype, device=device).bernoulli_(0.5)
    elif func.overloadpacket in _BY_SHAPE:
        real_args, real_kwargs = tree_map(lambda leaf: _in_place_of(leaf, device), (args, kwargs))
        func(*real_args, **real_kwargs)


def _in_place_of(leaf: Any, device: torch.device) -> Any:
    """Return a real tensor, of probabilities maybe, for a shape; and no tensor for a real one."""
    if not isinstance(leaf, Tensor):
        return leaf
    found = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
    return found.fill_(0.5)

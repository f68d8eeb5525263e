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
# On the CPU these draw the same in pieces. torch draws normal numbers by 16.
_IN_PIECES = {aten.normal_, aten.uniform_}
_PIECE = 1 << 20  # elements


def draws_by_shape(func: torch._ops.OpOverload) -> bool:
    """Whether :func:`advance_generator` knows what an operation draws, if it does."""
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return not draws or func.overloadpacket in {*_BY_SHAPE, aten.native_dropout}


def advance_generator(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> None:
    """Draw what the owner draws, so that what is drawn next is the same on every stage."""
    if func.overloadpacket is aten.native_dropout:
        torch.empty(args[0].shape, dtype=args[0].dtype, device=device).bernoulli_(0.5)
    elif func.overloadpacket in _IN_PIECES and _is_plain(args[0], device):
        _draw_in_pieces(func, args, kwargs)
    elif func.overloadpacket in _BY_SHAPE:
        real_args, real_kwargs = tree_map(lambda leaf: _in_place_of(leaf, device), (args, kwargs))
        func(*real_args, **real_kwargs)


def _is_plain(written: Any, device: torch.device) -> bool:
    # Of what does not lie in one piece torch draws each number by itself.
    return device.type == "cpu" and bool(written.is_contiguous())


def _draw_in_pieces(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Draw a large tensor's numbers without the memory for it; the last piece is the longest."""
    written, *bounds = args
    left = written.numel()
    piece = torch.empty(min(left, 2 * _PIECE), dtype=written.dtype, device="cpu")
    while left:
        count = left if left < 2 * _PIECE else _PIECE
        func(piece[:count], *bounds, **kwargs)
        left -= count


def _in_place_of(leaf: Any, device: torch.device) -> Any:
    """Return a real tensor, of probabilities maybe, for a shape; and no tensor for a real one."""
    if not isinstance(leaf, Tensor):
        return leaf
    found = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
    return found.fill_(0.5)

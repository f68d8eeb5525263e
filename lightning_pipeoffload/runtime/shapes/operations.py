"""Properties of operations: writes, results, random numbers; foreach operations by member."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map  # private: see runtime/leaves

from lightning_pipeoffload.runtime.shapes.meta_kernels import gives_new_tensors

aten = torch.ops.aten

# Their results depend on their arguments or on random numbers only: real on every stage.
FACTORIES = {
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.rand_like,
    aten.randn_like, aten.randint_like, aten.new_zeros, aten.new_ones, aten.new_full,
    aten.new_empty,
}  # fmt: skip

_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@cache
def is_ordinary(func: torch._ops.OpOverload) -> bool:
    """Return whether an operation only makes new tensors, with shapes that depend on shapes."""
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
    special = {*FACTORIES, aten._local_scalar_dense, aten.index}
    return (
        gives_new_tensors(func)
        and tags.isdisjoint(func.tags)
        and func.overloadpacket not in special
        and not is_foreach(func)
    )


def written_arguments(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NO_OPTIONS
) -> Iterator[Any]:
    """Yield the arguments that an operation writes in place, including ``out=``."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)


def call_factory(
    func: torch._ops.OpOverload, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Run one of :data:`FACTORIES` with real values, though an argument is shape-only."""
    source = args[0]
    real = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=device)
    made: Tensor = func(real, *args[1:], **{**kwargs, "device": device})
    return made


def as_stored(meta: Tensor) -> Tensor:
    """Return a view of the same memory without conjugate and negative bits."""
    meta = meta.conj() if meta.is_conj() else meta
    # Private: the only way to clear the bit without a copy.
    return meta._neg_view() if meta.is_neg() else meta


aten = torch.ops.aten
_NORM = aten._foreach_norm  # private: torch clips by it, and a gradient may know its norm


@cache
def is_foreach(func: torch._ops.OpOverload) -> bool:
    """Return whether an operation does the same to each member of lists of tensors."""
    return func.overloadpacket.__name__.startswith("_foreach_")


def goes_member_by_member(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether :func:`run_members` has to run an operation."""
    return is_foreach(func) and (_num_members(args) > 1 or func.overloadpacket is _NORM)


def _num_members(args: tuple[Any, ...]) -> int:
    return len(next(value for value in args if isinstance(value, (list, tuple))))


def run_members(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_shape: Callable[[Any], bool],
) -> Any:
    """Run ``func`` once on all real members, and separately on each shape-only member.

    ``is_shape`` returns whether a pytree has a shape-only tensor.
    """
    count = _num_members(args)
    members = [_take((args, kwargs), [index]) for index in range(count)]
    shapes = [index for index, member in enumerate(members) if is_shape(member)]
    real = [index for index in range(count) if index not in set(shapes)]
    results: dict[int, Any] = {}
    if real:
        some_args, some_kwargs = _take((args, kwargs), real)
        results.update(_listed(real, func(*some_args, **some_kwargs)))
    for index in shapes:
        results.update(_listed([index], _run_alone(func, *members[index])))
    return [results[index] for index in range(count)] if results else None


def _listed(indices: list[int], found: Any) -> dict[int, Any]:
    return {} if found is None else dict(zip(indices, found, strict=True))


def _run_alone(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.overloadpacket is _NORM:
        (tensor,), *order = args
        return [aten.linalg_vector_norm(tensor, *order, **kwargs)]
    return func(*args, **kwargs)


def _take(tree: Any, indices: list[int]) -> Any:
    """Select members of each list among the arguments."""
    args, kwargs = tree

    def take(value: Any) -> Any:
        return [value[index] for index in indices] if isinstance(value, (list, tuple)) else value

    return tuple(map(take, args)), {name: take(value) for name, value in kwargs.items()}


aten = torch.ops.aten

# The number of random numbers that they draw depends on the shape alone.
_BY_SHAPE = {
    aten.bernoulli_, aten.cauchy_, aten.exponential_, aten.geometric_, aten.log_normal_,
    aten.normal_, aten.random_, aten.uniform_, aten.bernoulli, aten.normal,
}  # fmt: skip
# On the CPU they draw the same numbers in pieces. torch draws normal numbers in groups of 16.
_IN_PIECES = {aten.normal_, aten.uniform_}
_PIECE = 1 << 20  # elements


def draws_by_shape(func: torch._ops.OpOverload) -> bool:
    """Whether :func:`advance_generator` knows how many random numbers an operation draws."""
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return not draws or func.overloadpacket in {*_BY_SHAPE, aten.native_dropout}


def advance_generator(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> None:
    """Draw and discard the owner's random numbers: the next ones are the same on all stages."""
    if func.overloadpacket is aten.native_dropout:
        torch.empty(args[0].shape, dtype=args[0].dtype, device=device).bernoulli_(0.5)
    elif func.overloadpacket in _IN_PIECES and _is_drawn_in_pieces(args[0], device):
        _draw_in_pieces(func, args, kwargs)
    elif func.overloadpacket in _BY_SHAPE:
        real_args, real_kwargs = tree_map(lambda leaf: _in_place_of(leaf, device), (args, kwargs))
        func(*real_args, **real_kwargs)


def _is_drawn_in_pieces(written: Any, device: torch.device) -> bool:
    # For a non-contiguous tensor torch draws each number separately.
    return device.type == "cpu" and bool(written.is_contiguous())


def _draw_in_pieces(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Draw a large tensor's numbers without its memory; the last piece is the longest."""
    written, *bounds = args
    left = written.numel()
    piece = torch.empty(min(left, 2 * _PIECE), dtype=written.dtype, device="cpu")
    while left:
        count = left if left < 2 * _PIECE else _PIECE
        func(piece[:count], *bounds, **kwargs)
        left -= count


def _in_place_of(leaf: Any, device: torch.device) -> Any:
    """Return a real tensor like a shape-only one, filled with 0.5, a valid probability."""
    if not isinstance(leaf, Tensor):
        return leaf
    found = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
    return found.fill_(0.5)

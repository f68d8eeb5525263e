"""What is known of an operation by itself, whatever it is called with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.shapes.foreach import is_foreach
from lightning_pipeoffload.runtime.shapes.meta_kernels import gives_new_tensors

aten = torch.ops.aten

# The value of these is known from their arguments, or drawn: they are real on every stage.
FACTORIES = {
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.rand_like,
    aten.randn_like, aten.randint_like, aten.new_zeros, aten.new_ones, aten.new_full,
    aten.new_empty,
}  # fmt: skip

_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


@cache
def is_ordinary(func: torch._ops.OpOverload) -> bool:
    """Whether all that an operation does is to make new tensors, of shapes that shapes decide."""
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
    """Yield the arguments that an operation writes in place; ``out=`` is one."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, (list, tuple)) else (value,)


def call_factory(
    func: torch._ops.OpOverload, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Make a real tensor like a shape-only one; see :data:`FACTORIES`."""
    source = args[0]
    real = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=device)
    made: Tensor = func(real, *args[1:], **{**kwargs, "device": device})
    return made


def as_stored(meta: Tensor) -> Tensor:
    """Return the same memory, not to be read conjugated or negated: operations would resolve it."""
    meta = meta.conj() if meta.is_conj() else meta
    # Private: the one way to take the mark off without a copy.
    return meta._neg_view() if meta.is_neg() else meta

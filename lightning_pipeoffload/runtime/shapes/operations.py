"""Runs operations without values: on the meta device, on each member of a list, with random draws.

Also tells properties of an operation, such as the arguments that it writes in place. Results on the
meta device are cached by the shapes of the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map  # private: see runtime/leaves

from lightning_pipeoffload.runtime import map_operands

aten = torch.ops.aten
_TORCHS_OWN = {"aten", "prims", "prim"}

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
    """Run one of :data:`FACTORIES` on a shape-only argument; the result is a real tensor."""
    source = args[0]
    real = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=device)
    tensor: Tensor = func(real, *args[1:], **{**kwargs, "device": device})
    return tensor


@cache
def lengths_argument_index(func: torch._ops.OpOverload) -> int | None:
    """Return the index of the argument with the lengths of packed sequences; None: there is none.

    Torch reads its values on the CPU; the shapes of the results depend on them.
    """
    names = [part.name for part in func._schema.arguments if not part.kwarg_only]
    return next((place for place, name in enumerate(names) if name in _LENGTHS), None)


_LENGTHS = {"lengths", "batch_sizes"}  # of packing and padding, and of recurrent layers between


def clear_conj_neg_bits(meta: Tensor) -> Tensor:
    """Return a view of the same memory without conjugate and negative bits."""
    meta = meta.conj() if meta.is_conj() else meta
    # Private: the only way to clear the bit without a copy.
    return meta._neg_view() if meta.is_neg() else meta


_NORM = aten._foreach_norm  # private: torch clips by it, and a gradient may know its norm


@cache
def is_foreach(func: torch._ops.OpOverload) -> bool:
    """Return whether an operation does the same to each member of lists of tensors."""
    return func.overloadpacket.__name__.startswith("_foreach_")


def goes_member_by_member(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether an operation is a foreach operation that :func:`run_members` has to run."""
    return is_foreach(func) and (_num_foreach_tensors(args) > 1 or func.overloadpacket is _NORM)


def _num_foreach_tensors(args: tuple[Any, ...]) -> int:
    return len(next(value for value in args if isinstance(value, (list, tuple))))


def run_members(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_shape: Callable[[Any], bool],
) -> Any:
    """Run a foreach operation once on all real members, and separately on each shape-only one.

    Args:
        func: The foreach operation.
        args: Its arguments.
        kwargs: Its keyword arguments.
        is_shape: Returns whether a pytree contains a shape-only tensor.

    Returns:
        The results of the members in order; None if the operation returns nothing.
    """
    count = _num_foreach_tensors(args)
    members = [_entries_at((args, kwargs), [index]) for index in range(count)]
    shapes = [index for index, member in enumerate(members) if is_shape(member)]
    real = [index for index in range(count) if index not in set(shapes)]
    results: dict[int, Any] = {}
    if real:
        some_args, some_kwargs = _entries_at((args, kwargs), real)
        results.update(_listed(real, func(*some_args, **some_kwargs)))
    for index in shapes:
        results.update(_listed([index], _run_alone(func, *members[index])))
    return [results[index] for index in range(count)] if results else None


def _listed(indices: list[int], values: Any) -> dict[int, Any]:
    return {} if values is None else dict(zip(indices, values, strict=True))


def _run_alone(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func.overloadpacket is _NORM:
        (tensor,), *order = args
        return [aten.linalg_vector_norm(tensor, *order, **kwargs)]
    return func(*args, **kwargs)


def _entries_at(tree: Any, indices: list[int]) -> Any:
    """Select members of each list among the arguments."""
    args, kwargs = tree

    def pick(value: Any) -> Any:
        return [value[index] for index in indices] if isinstance(value, (list, tuple)) else value

    return tuple(map(pick, args)), {name: pick(value) for name, value in kwargs.items()}


# The number of random numbers that they draw depends on the shape alone.
DRAWS_BY_SHAPE = {
    aten.bernoulli_, aten.cauchy_, aten.exponential_, aten.geometric_, aten.log_normal_,
    aten.normal_, aten.random_, aten.uniform_, aten.bernoulli, aten.normal,
}  # fmt: skip
# On the CPU they draw the same numbers in pieces. torch draws normal numbers in groups of 16.
_IN_PIECES = {aten.normal_, aten.uniform_}
_PIECE = 1 << 20  # elements


def has_known_draw_count(func: torch._ops.OpOverload) -> bool:
    """Whether :func:`advance_generator` knows how many random numbers an operation draws."""
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return not draws or func.overloadpacket in {*DRAWS_BY_SHAPE, aten.native_dropout}


def advance_generator(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
) -> None:
    """Draw and discard the random numbers that the stage with the value draws.

    So generators are in the same state on all stages afterwards.
    """
    if func.overloadpacket is aten.native_dropout:
        torch.empty(args[0].shape, dtype=args[0].dtype, device=device).bernoulli_(0.5)
    elif func.overloadpacket in _IN_PIECES and _is_drawn_in_pieces(args[0], device):
        _draw_in_pieces(func, args, kwargs)
    elif func.overloadpacket in DRAWS_BY_SHAPE:
        real_args, real_kwargs = tree_map(lambda leaf: _filled_like(leaf, device), (args, kwargs))
        func(*real_args, **real_kwargs)


def _is_drawn_in_pieces(written: Any, device: torch.device) -> bool:
    # For a non-contiguous tensor torch draws each number separately.
    return device.type == "cpu" and bool(written.is_contiguous())


def _draw_in_pieces(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Advance the generator as drawing a whole tensor would, with the memory of a piece of it.

    The last piece has up to twice as many elements, so that none is too short.
    """
    written, *bounds = args
    left = written.numel()
    piece = torch.empty(min(left, 2 * _PIECE), dtype=written.dtype, device="cpu")
    while left:
        count = left if left < 2 * _PIECE else _PIECE
        func(piece[:count], *bounds, **kwargs)
        left -= count


def _filled_like(leaf: Any, device: torch.device) -> Any:
    """Return a real tensor like a shape-only one, filled with 0.5, a valid probability."""
    if not isinstance(leaf, Tensor):
        return leaf
    filled = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
    return filled.fill_(0.5)


def run_on_meta(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    in_new_memory: bool,
) -> Any:
    """Run ``func`` on meta tensors, or return the cached result for the same shapes.

    Args:
        func: The operation.
        args: Its arguments, on the meta device.
        kwargs: Its keyword arguments.
        device: The device of the real tensors. A custom operator without a meta kernel runs there,
            on zeros.
        in_new_memory: Whether each result needs memory of its own.
    """
    key = result_cache_key(func, args, kwargs)
    if key is not None and key not in RESULTS:
        if len(RESULTS) == _MOST_RESULTS:
            RESULTS.clear()
        with torch.inference_mode(False):
            result = _run(func, args, kwargs, device)
        RESULTS[key] = result if _has_own_memory(result, args) else None
    cached = RESULTS.get(key)
    if cached is None:
        return _run(func, args, kwargs, device)
    return map_operands(_empty_meta_like, cached) if in_new_memory else cached


def _run(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Any:
    kernel = _KERNELS.get(func, func)
    try:
        return kernel(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        if func.namespace in _TORCHS_OWN:
            raise
    args, kwargs = map_operands(lambda leaf: _zeros_on_device(leaf, device), (args, kwargs))
    return map_operands(_to_meta, func(*args, **kwargs))


def _to_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


def _zeros_on_device(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return torch.zeros_like(leaf, device=device)
    return device if isinstance(leaf, torch.device) else leaf


def result_cache_key(
    func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, ...] | None:
    """Return a cache key for a call; None if its result is a view, or has no hashable key."""
    if not gives_new_tensors(func):
        return None
    key: list[Any] = [func, torch.get_default_dtype()]
    for value in (*args, *chain.from_iterable(kwargs.items())):
        if isinstance(value, Tensor):
            key += value.shape, value.stride(), value.dtype
        elif value is None or isinstance(value, _PLAIN):
            key += type(value), value
        elif isinstance(value, (list, tuple)) and all(isinstance(v, _PLAIN) for v in value):
            key += type(value), *map(type, value), *value
        else:
            return None
    return tuple(key)


@cache
def gives_new_tensors(func: torch._ops.OpOverload) -> bool:
    """Return whether, by its schema, an operation makes only new tensors, of known shapes."""
    schema = func._schema
    aliases = [part.alias_info for part in (*schema.arguments, *schema.returns)]
    types = {str(part.type) for part in schema.returns}
    is_by_shapes = func.namespace in _TORCHS_OWN and lengths_argument_index(func) is None
    return is_by_shapes and types == {"Tensor"} and not any(aliases)


def _has_own_memory(result: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a result shares no memory with the arguments; ``_unsafe_view``'s does."""
    tensors = result if isinstance(result, tuple) else (result,)
    if not all(isinstance(tensor, Tensor) and has_plain_storage(tensor) for tensor in tensors):
        return False
    memory = {tensor.untyped_storage()._cdata for tensor in tensors}
    operands = [value for value in args if isinstance(value, Tensor) and has_plain_storage(value)]
    return memory.isdisjoint(tensor.untyped_storage()._cdata for tensor in operands)


def has_plain_storage(tensor: Tensor) -> bool:
    """Return whether a tensor's memory has its values as they are: strided, no lazy conjugate."""
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _empty_meta_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


_PLAIN = (bool, int, float, str, torch.dtype, torch.layout, torch.device, torch.memory_format)
_MOST_RESULTS = 4096
# One for the process: a result depends on its key alone.
RESULTS: dict[tuple[Any, ...] | None, Any] = {}
"""The cached results of :func:`run_on_meta`, by :func:`result_cache_key`; None: it has to run."""


def _grouped_mm(
    left: Tensor,
    right: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Torch's meta kernel takes bfloat16 only, and asks for a GPU's alignment."""
    groups: tuple[int, ...] = ()
    if left.dim() == right.dim() == 3:
        groups = (left.shape[0],)
    elif left.dim() == right.dim():
        groups = (0 if offsets is None else len(offsets),)
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]), dtype=out_dtype)


_KERNELS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm  # private: Hugging Face's experts use it
}

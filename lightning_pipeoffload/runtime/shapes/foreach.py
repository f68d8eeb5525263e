"""Operations on lists of tensors of which some are shapes: each member for itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

aten = torch.ops.aten
_NORM = aten._foreach_norm  # private: by it torch clips, and of a gradient its answer may be known


@cache
def is_foreach(func: torch._ops.OpOverload) -> bool:
    """Whether an operation takes lists, and does the same to each member."""
    return func.overloadpacket.__name__.startswith("_foreach_")


def goes_member_by_member(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether an operation is left to :func:`run_members`, which calls it with one member again."""
    return is_foreach(func) and (_num_members(args) > 1 or func.overloadpacket is _NORM)


def _num_members(args: tuple[Any, ...]) -> int:
    return len(next(value for value in args if isinstance(value, (list, tuple))))


def run_members(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_shape: Callable[[Any], bool],
) -> Any:
    """Run ``func`` on the real members together, as if they were all, and on each shape alone.

    Args:
        func: The operation.
        args: The arguments of the operation.
        kwargs: The keyword arguments of the operation.
        is_shape: Whether a pytree has a shape-only tensor.

    Returns:
        What ``func`` returns: a list, or nothing where it writes in place.
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
    """Take some members of each list among the arguments."""
    args, kwargs = tree

    def take(value: Any) -> Any:
        return [value[index] for index in indices] if isinstance(value, (list, tuple)) else value

    return tuple(map(take, args)), {name: take(value) for name, value in kwargs.items()}

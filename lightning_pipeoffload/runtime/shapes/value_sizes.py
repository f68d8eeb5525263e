"""Operations whose sizes depend on values: refused, or made up as far as the step's run says."""

from __future__ import annotations

from typing import Any

import torch

from lightning_pipeoffload.runtime.shapes.imagined_values import Imagined, can_make_result, is_mask
from lightning_pipeoffload.runtime.shapes.step_rules import imagine, may_imagine
from lightning_pipeoffload.runtime.shapes.value_needed import ValueNeededError

aten = torch.ops.aten

# What the user wrote, where torch calls it otherwise.
_USERS_WORDS = {"index": "indexing with a mask"}


def imagine_sizes(
    func: torch._ops.OpOverload, args: tuple[Any, ...], origins: frozenset[str]
) -> Imagined | None:
    """Refuse an operation whose sizes depend on values, or say how to make them up.

    Returns:
        The way to make them up; None where the sizes are known.

    Raises:
        ValueNeededError: They depend on values, and nothing is made up.
    """
    if not is_sized_by_values(func, args):
        return None
    name = func.overloadpacket.__name__
    operation = _USERS_WORDS.get(name, f"{name}()")
    if not can_make_result(func):
        raise ValueNeededError(operation, origins)
    return imagine(operation, origins)


def is_sized_by_values(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the shape of what an operation returns depends on values."""
    return torch.Tag.dynamic_output_shape in func.tags and not _is_index_by_numbers(func, args)


def _is_index_by_numbers(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether ``func`` is an indexing whose result has a known shape, as no mask's has."""
    return func.overloadpacket is aten.index and not any(map(is_mask, args[1]))


def with_fitting_parts(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Make one part of all, if lengths that are made up do not add up."""
    if func is not aten.split_with_sizes.default or not args[1]:
        return args
    source, (_, *others), *place = args
    length = source.shape[place[0] if place else 0]
    if sum(args[1]) == length or not may_imagine():
        return args
    return (source, [length, *(0 for _ in others)], *place)

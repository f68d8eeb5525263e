"""What holds for tensors without a value while a step runs, and the error for a missing value.

The caller of the step sets the rules: which operations are observed, which values are made up, and
which writes are dropped.

Operations whose sizes depend on values are refused or made up. A mixture of experts searches for
the tokens of each expert; how many there are is known only on the stage that runs the block. So the
block is traced as if everything was found, and what it hands on is compared with that when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.in_force import IN_FORCE


class ValueNeededError(BaseException):
    """Code asked for a value that exists on another stage only.

    Not an ``Exception``: a step's own ``except Exception`` would go on without the value.
    ``origins`` are the names of the tensors that the value was computed from.
    """

    def __init__(self, operation: str, origins: frozenset[str]) -> None:
        super().__init__(f"{operation} needs the value of {describe_origins(origins)}")
        self.operation = operation
        self.origins = origins


def describe_origins(origins: frozenset[str]) -> str:
    """Name up to three origins."""
    names = sorted(origins)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "something computed from " + ", ".join(names[:3]) + more


class Imagined(NamedTuple):
    """Made-up values: every boolean is ``flag``, every number is 1."""

    flag: bool


EVERYTHING = Imagined(flag=True)
# Behind the blocks most questions are whether something is wrong.
NO_ALARM = Imagined(flag=False)


Observer = Callable[[torch._ops.OpOverload, tuple[Any, ...], Any], None]


@dataclass(frozen=True)
class StepRules:
    """The rules of one run of a step; the defaults are those of a stage.

    Attributes:
        observe: Called with each operation on shape-only tensors, its arguments and its result.
        imagine: Returns how to make up a value that code asks for; None: it is refused.
        drop: Whether to drop a write of a missing value into a real tensor. For buffers such as
            running statistics, whose true value is on the stage that computes them.
    """

    observe: Observer | None = None
    imagine: Callable[[], Imagined | None] | None = None
    drop: Callable[[Tensor], bool] | None = None


_OUTSIDE = StepRules()


def _rules() -> StepRules:
    return IN_FORCE.latest(StepRules) or _OUTSIDE


def is_in_step() -> bool:
    """Whether a step of any pipeline runs; code outside is a hook's or a script's."""
    return IN_FORCE.latest(StepRules) is not None


def tell_observers(func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
    """Report an operation that was run, if the step's rules ask for it."""
    observe = _rules().observe
    if observe is not None:
        observe(func, args, result)


def are_observed() -> bool:
    """Whether operations are observed, and their results not used."""
    return _rules().observe is not None


def imagine(operation: str, origins: frozenset[str]) -> Imagined:
    """Return how to make up a value, or raise ``ValueNeededError`` where none is made up."""
    imagined = _imagined()
    if imagined is None:
        raise ValueNeededError(operation, origins)
    return imagined


def may_imagine() -> bool:
    """Whether values are made up here."""
    return _imagined() is not None


def _imagined() -> Imagined | None:
    ask = _rules().imagine
    return None if ask is None else ask()


def is_dropped(written: Tensor) -> bool:
    """Whether a write into a real tensor is dropped."""
    drop = _rules().drop
    return drop is not None and drop(written)


aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def make_result(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return a meta tensor that ``func``, one of ``_MAKERS``, might return."""
    return _MAKERS[func](*args, **kwargs)


def is_mask(index: Any) -> bool:
    """Whether indexing by it gives as many rows as it has true elements."""
    return isinstance(index, Tensor) and index.dtype in _MASKS


def _find(searched: Tensor) -> Tensor:
    return searched.new_empty((searched.numel(), searched.dim()), dtype=torch.long)


def _index(source: Tensor, indices: Sequence[Tensor | None]) -> Any:
    found: list[Tensor | None] = []
    for index in indices:
        found += _find(index).unbind(1) if is_mask(index) else [index]  # type: ignore[arg-type]
    return aten.index(source, found)


def _select(source: Tensor, mask: Tensor) -> Tensor:
    count = torch.broadcast_shapes(source.shape, mask.shape).numel()
    return source.new_empty((count,))


def _unique(
    source: Tensor, is_sorted: bool = True, inverse: bool = False, *_: Any
) -> tuple[Tensor, ...]:
    count = source.numel()
    places = source.new_empty(source.shape if inverse else (0,), dtype=torch.long)
    return source.new_empty((count,)), places, places.new_empty((count,))


def _unique_consecutive(
    source: Tensor, inverse: bool = False, counts: bool = False, dim: Any = None
) -> tuple[Tensor, ...]:
    if dim is None:
        return _unique(source, True, inverse)
    return _unique_along(source, dim)


def _unique_along(source: Tensor, dim: int, *_: Any) -> tuple[Tensor, ...]:
    places = source.new_empty((source.shape[dim],), dtype=torch.long)
    return source.new_empty(source.shape), places, torch.empty_like(places)


def _count(source: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    # A caller that gives the number of bins expects no more.
    length = minlength or source.numel()
    dtype = torch.long if weights is None else weights.dtype
    return source.new_empty((length,), dtype=dtype)


def _repeat(repeats: Tensor, output_size: int | None = None) -> Tensor:
    length = repeats.numel()
    return repeats.new_empty((length if output_size is None else output_size,), dtype=torch.long)


def _one_hot(source: Tensor, num_classes: int = -1) -> Tensor:
    count = num_classes if num_classes >= 0 else 2
    return source.new_empty((*source.shape, count))


_MAKERS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.nonzero.default: _find,
    aten.index.Tensor: _index,
    aten.masked_select.default: _select,
    aten._unique2.default: _unique,  # private: what unique() calls
    aten.unique_consecutive.default: _unique_consecutive,
    aten.unique_dim.default: _unique_along,
    aten.bincount.default: _count,
    aten.repeat_interleave.Tensor: _repeat,
    aten.one_hot.default: _one_hot,
}


# The user's words for an operation that torch names otherwise.
_USERS_WORDS = {"index": "indexing with a mask"}


def imagine_sizes(
    func: torch._ops.OpOverload, args: tuple[Any, ...], origins: frozenset[str]
) -> Imagined | None:
    """Return how to make up the sizes of an operation's result; None where they are known.

    Raises:
        ValueNeededError: They depend on values, and the step's rules make none up.
    """
    if not is_sized_by_values(func, args):
        return None
    name = func.overloadpacket.__name__
    operation = _USERS_WORDS.get(name, f"{name}()")
    if func not in _MAKERS:
        raise ValueNeededError(operation, origins)
    return imagine(operation, origins)


def is_sized_by_values(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether the shape of what an operation returns depends on values."""
    if func.overloadpacket is aten.index:
        return any(map(is_mask, args[1]))
    return torch.Tag.dynamic_output_shape in func.tags


def with_fitting_parts(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Split into one part that has all, if lengths that are made up do not add up."""
    if func is not aten.split_with_sizes.default or not args[1]:
        return args
    source, (_, *others), *place = args
    length = source.shape[place[0] if place else 0]
    if sum(args[1]) == length or not may_imagine():
        return args
    return (source, [length, *(0 for _ in others)], *place)

"""Rules for shape-only tensors while a step runs, and the error for a missing value.

The caller of the step sets the rules: an observer of operations, values to make up, and writes to
drop.

Sizes that depend on values are refused or made up. A mixture of experts selects the tokens of each
expert; their number is known only on the stage that runs the block. So the block is traced as if
every expert got all tokens, and its output is compared with the traced shapes when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeoffload.runtime import ACTIVE_SETTINGS


class ValueNeededError(BaseException):
    """Code reads a value that exists on another stage only.

    It is no ``Exception``: a step's own ``except Exception`` would continue without the value.
    ``origins`` are the names of the tensors that the value was computed from.
    """

    def __init__(self, operation: str, origins: frozenset[str]) -> None:
        super().__init__(f"{operation} needs the value of {describe_origins(origins)}")
        self.origins = origins


class AddressNeededError(ValueNeededError):
    """A kernel asks for the address of a tensor that has no value."""

    def __init__(self, origins: frozenset[str], reason: str = "") -> None:
        super().__init__("a kernel that is called with a tensor's address", origins)
        self.reason = reason

    def __str__(self) -> str:
        return f"{super().__str__()}: {self.reason or _MAKE_OPERATOR}"


_MAKE_OPERATOR = (
    "call it in an autograd.Function, or in a module that holds no blocks, which is run on zeros "
    "where values are missing; or make an operator of it with torch.library, with a function of "
    "shapes"
)


def describe_origins(origins: frozenset[str]) -> str:
    """Return a phrase with up to three names of the tensors that a value was computed from."""
    names = sorted(origins)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "something computed from " + ", ".join(names[:3]) + more


class AssumedValues(NamedTuple):
    """Made-up values: every boolean is ``flag``, every number is 1."""

    flag: bool


EVERYTHING = AssumedValues(flag=True)
# After the blocks most flags that code reads ask whether something is wrong.
NO_ALARM = AssumedValues(flag=False)


Observer = Callable[[torch._ops.OpOverload, tuple[Any, ...], Any], None]


@dataclass(frozen=True)
class StepRules:
    """The rules of one run of a step; the defaults are those of a stage.

    Attributes:
        observe: Called with each operation on shape-only tensors, its arguments and its result.
        assume_value: Returns how to make up a value that code reads, or None to refuse the read.
        drop: Returns whether to drop a write of a missing value into a real tensor, such as
            running statistics, whose true value is on the stage that computes them.
    """

    observe: Observer | None = None
    assume_value: Callable[[], AssumedValues | None] | None = None
    drop: Callable[[Tensor], bool] | None = None


_OUTSIDE = StepRules()
RULES = ACTIVE_SETTINGS.stack(StepRules)
"""The rules in force are the last; empty outside of steps. Read directly at each operation."""


def _rules() -> StepRules:
    return RULES[-1] if RULES else _OUTSIDE


def is_in_step() -> bool:
    """Return whether a step of any pipeline is running, not a hook or a script."""
    return bool(RULES)


def notify_observer(func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
    """Report an operation to the observer, if the step's rules have one."""
    observe = _rules().observe
    if observe is not None:
        observe(func, args, result)


def has_observer() -> bool:
    """Return whether an observer is set: then this is a trace, whose results are not used."""
    return bool(RULES) and RULES[-1].observe is not None


def assume_value(operation: str, origins: frozenset[str]) -> AssumedValues:
    """Return how to make up a missing value that an operation reads.

    Raises:
        ValueNeededError: The running step's rules do not make up values here.
    """
    assumed = _assumed()
    if assumed is None:
        raise ValueNeededError(operation, origins)
    return assumed


def may_assume() -> bool:
    """Return whether code that now reads a missing value gets a made-up one, not an error."""
    return _assumed() is not None


def _assumed() -> AssumedValues | None:
    ask = _rules().assume_value
    return None if ask is None else ask()


def is_dropped(written: Tensor) -> bool:
    """Return whether the running step's rules drop a write of a missing value into a tensor."""
    drop = _rules().drop
    return drop is not None and drop(written)


aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


def make_result(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return a meta tensor as a possible result of an operation with value-dependent sizes."""
    return _MAKERS[func](*args, **kwargs)


def is_mask(index: Any) -> bool:
    """Return whether ``index`` is a mask, which selects as many rows as it has true elements."""
    return isinstance(index, Tensor) and index.dtype in _MASKS


def _found_places(searched: Tensor) -> Tensor:
    return searched.new_empty((searched.numel(), searched.dim()), dtype=torch.long)


def _index(source: Tensor, indices: Sequence[Tensor | None]) -> Any:
    expanded: list[Tensor | None] = []
    for index in indices:
        expanded += _found_places(index).unbind(1) if is_mask(index) else [index]  # type: ignore[arg-type]
    return aten.index(source, expanded)


def _selected_elements(source: Tensor, mask: Tensor) -> Tensor:
    count = torch.broadcast_shapes(source.shape, mask.shape).numel()
    return source.new_empty((count,))


def _unique_elements(
    source: Tensor, is_sorted: bool = True, inverse: bool = False, *_: Any
) -> tuple[Tensor, ...]:
    count = source.numel()
    places = source.new_empty(source.shape if inverse else (0,), dtype=torch.long)
    return source.new_empty((count,)), places, places.new_empty((count,))


def _unique_consecutive(
    source: Tensor, inverse: bool = False, counts: bool = False, dim: Any = None
) -> tuple[Tensor, ...]:
    if dim is None:
        return _unique_elements(source, True, inverse)
    return _unique_along(source, dim)


def _unique_along(source: Tensor, dim: int, *_: Any) -> tuple[Tensor, ...]:
    places = source.new_empty((source.shape[dim],), dtype=torch.long)
    return source.new_empty(source.shape), places, torch.empty_like(places)


def _bincount(source: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    # A caller that gives the number of bins expects no more.
    length = minlength or source.numel()
    dtype = torch.long if weights is None else weights.dtype
    return source.new_empty((length,), dtype=dtype)


def _repeated_elements(repeats: Tensor, output_size: int | None = None) -> Tensor:
    length = repeats.numel()
    return repeats.new_empty((length if output_size is None else output_size,), dtype=torch.long)


def _one_hot(source: Tensor, num_classes: int = -1) -> Tensor:
    count = num_classes if num_classes >= 0 else 2
    return source.new_empty((*source.shape, count))


def _aligned_sequences(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch = log_probs.shape[1:-1]  # none of a single sequence
    alphas = *batch, log_probs.shape[0], 2 * targets.shape[-1] + 1  # the longest target's
    return log_probs.new_empty(batch), log_probs.new_empty(alphas)


_MAKERS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    aten.nonzero.default: _found_places,
    aten.index.Tensor: _index,
    aten.masked_select.default: _selected_elements,
    aten._unique2.default: _unique_elements,  # private: what unique() calls
    aten.unique_consecutive.default: _unique_consecutive,
    aten.unique_dim.default: _unique_along,
    aten.bincount.default: _bincount,
    aten.repeat_interleave.Tensor: _repeated_elements,
    aten.one_hot.default: _one_hot,
    aten._ctc_loss.default: _aligned_sequences,  # private: what ctc_loss() calls
    aten._ctc_loss.Tensor: _aligned_sequences,
}


# Names that users know, for operations that torch names differently.
_USERS_WORDS = {"index": "indexing with a mask", "_ctc_loss": "ctc_loss()"}


def assume_sizes(
    func: torch._ops.OpOverload, args: tuple[Any, ...], origins: frozenset[str]
) -> AssumedValues | None:
    """Return how to make up the sizes of an operation's result; None if they are known.

    Raises:
        ValueNeededError: The sizes depend on values that the step's rules do not make up.
    """
    if not is_sized_by_values(func, args):
        return None
    name = func.overloadpacket.__name__
    operation = _USERS_WORDS.get(name, f"{name}()")
    if func not in _MAKERS:
        raise ValueNeededError(operation, origins)
    return assume_value(operation, origins)


def is_sized_by_values(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether the shape of an operation's result depends on values."""
    if func.overloadpacket is aten.index:
        return any(map(is_mask, args[1]))
    return torch.Tag.dynamic_output_shape in func.tags


def fit_split_sizes(func: torch._ops.OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with valid sizes for a split whose made-up sizes have the wrong sum.

    The first piece gets the whole length, the others 0.
    """
    if func is not aten.split_with_sizes.default or not args[1]:
        return args
    source, (_, *others), *place = args
    length = source.shape[place[0] if place else 0]
    if sum(args[1]) == length or not may_assume():
        return args
    return (source, [length, *(0 for _ in others)], *place)

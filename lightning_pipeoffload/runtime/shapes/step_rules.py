"""What holds for tensors without a value while a step runs, and the error for a missing value.

The caller of the step sets the rules: which operations are observed, which values are made up, and
which writes are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
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

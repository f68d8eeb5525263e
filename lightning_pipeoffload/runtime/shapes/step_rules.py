"""What holds for tensors without a value while a step runs.

Who runs the step says it: which operations are observed, which values are made up, and which writes
are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.in_force import IN_FORCE
from lightning_pipeoffload.runtime.shapes.imagined_values import Imagined
from lightning_pipeoffload.runtime.shapes.value_needed import ValueNeededError

Observer = Callable[[torch._ops.OpOverload, tuple[Any, ...], Any], None]


@dataclass(frozen=True)
class StepRules:
    """The rules of one run of a step; by themselves those of a stage.

    Attributes:
        observe: Called with each operation on shape-only tensors, its arguments and its result;
            None: results are used, not looked at.
        imagine: Says how to make up a value that code asks for, or that it is not; None: none is.
        drop: Says whether a write into a real tensor is left out; None: none is. For buffers such
            as running statistics, whose true value is on the stage that computes them.
    """

    observe: Observer | None = None
    imagine: Callable[[], Imagined | None] | None = None
    drop: Callable[[Tensor], bool] | None = None


_OUTSIDE = StepRules()


def _rules() -> StepRules:
    return IN_FORCE.latest(StepRules) or _OUTSIDE


def is_in_step() -> bool:
    """Whether a step is being run, of whatever pipeline: code outside is a hook, or a script's."""
    return IN_FORCE.latest(StepRules) is not None


def tell_observers(func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
    """Let who runs the step know of an operation that was run."""
    observe = _rules().observe
    if observe is not None:
        observe(func, args, result)


def are_observed() -> bool:
    """Whether operations are followed, and their results not used."""
    return _rules().observe is not None


def imagine(operation: str, origins: frozenset[str]) -> Imagined:
    """Return how to make up a value.

    Raises:
        ValueNeededError: Nobody says how.
    """
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
    """Whether a write into a real tensor is left out."""
    drop = _rules().drop
    return drop is not None and drop(written)

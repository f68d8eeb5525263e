"""What holds for tensors without a value while a step runs.

Who runs the step says it: which operations are observed, which values are made up, and which writes
are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.shapes.imagined_values import Imagined
from lightning_pipeoffload.runtime.shapes.value_needed import ValueNeededError

Observer = Callable[[torch._ops.OpOverload, tuple[Any, ...], Any], None]
_observers: list[Observer] = []
_imagination: list[Callable[[], Imagined | None]] = []
_drop_rules: list[Callable[[Tensor], bool]] = []


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call ``observer(operation, arguments, result)`` for every operation on shape-only tensors."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def tell_observers(func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
    """Let observers know of an operation that was run."""
    for observe in _observers:
        observe(func, args, result)


def are_observed() -> bool:
    """Whether operations are followed, and their results not used."""
    return bool(_observers)


@contextmanager
def imagining_values(imagine: Callable[[], Imagined | None]) -> Iterator[None]:
    """Let code that asks for a value have one that is made up, if ``imagine()`` says how."""
    _imagination.append(imagine)
    try:
        yield
    finally:
        _imagination.remove(imagine)


def imagine(operation: str, origins: frozenset[str]) -> Imagined:
    """Return how to make up a value.

    Raises:
        ValueNeededError: Nobody says how.
    """
    for ask in _imagination:
        imagined = ask()
        if imagined is not None:
            return imagined
    raise ValueNeededError(operation, origins)


def may_imagine() -> bool:
    """Whether values are made up here."""
    return any(ask() for ask in _imagination)


@contextmanager
def dropping_writes(drop: Callable[[Tensor], bool]) -> Iterator[None]:
    """Leave out writes into real tensors for which ``drop(tensor)`` is true.

    For buffers such as running statistics, whose true value is on the stage that computes them.
    """
    _drop_rules.append(drop)
    try:
        yield
    finally:
        _drop_rules.remove(drop)


def is_dropped(written: Tensor) -> bool:
    """Whether a write into a real tensor is left out."""
    return any(drop(written) for drop in _drop_rules)

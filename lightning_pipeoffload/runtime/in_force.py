"""Settings of the running step for code that torch calls, to which nothing can be passed.

torch calls kernels of the dispatcher, operations on tensors without a value and checkpoints with
its own arguments. What they need of the step they find here::

    set by                    read by                              type
    F, B of a stage           kernels.py, node.py, the user's      WeightGradQueue: where weight
                              kernels by defer_weight_grad         gradients go
    every run of a step       ShapeOnly, at each operation         StepRules: what is observed, made
                                                                   up and dropped
    F, a checkpoint's rerun   torch.utils.checkpoint, at each call CheckpointWatch: compares both

It holds for the process, not for a thread or a context: on an accelerator autograd runs a backward
that the user's step starts in a thread of its own, which has to find the same. A process runs one
part of one step at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

_Said = TypeVar("_Said")


class InForce:
    """The settings that hold now, the latest of each type."""

    def __init__(self) -> None:
        self._said: defaultdict[type, list[Any]] = defaultdict(list)

    def latest(self, kind: type[_Said]) -> _Said | None:
        """Return what holds of a type; None if nothing was set."""
        said = self._said[kind]
        return said[-1] if said else None

    def begin(self, said: object) -> None:
        """Let ``said`` hold until its :meth:`end`."""
        self._said[type(said)].append(said)

    def end(self, said: object) -> None:
        """Let hold what held before ``said``, the latest of its type."""
        self._said[type(said)].pop()

    @contextmanager
    def during(self, said: object) -> Iterator[None]:
        """Let ``said`` hold inside."""
        self.begin(said)
        try:
            yield
        finally:
            self.end(said)


IN_FORCE = InForce()
"""The only one of the process."""

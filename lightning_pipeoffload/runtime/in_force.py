"""What the run of a step says to code that torch calls, and that so can be handed nothing.

Kernels of the dispatcher, operations on tensors without a value and checkpoints are called by
torch, with torch's arguments. What they have to know of the step they ask for here::

    said by                   asked by                             what
    F, B of a stage           kernels.py, node.py, the user's      WeightGradQueue: where weight
                              kernels by defer_weight_grad         gradients go
    every run of a step       ShapeOnly, at each operation         StepRules: what is observed, made
                                                                   up and left out
    F, a checkpoint's rerun   torch.utils.checkpoint, at each call CheckpointWatch: who follows it

It holds for the process, not for a thread or a context: a backward that the user's step starts runs
in a thread of autograd's own where there is an accelerator, and what it calls has to find the same.
A process runs one part of one step at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

_Said = TypeVar("_Said")


class InForce:
    """What holds now, of each kind what was said last."""

    def __init__(self) -> None:
        self._said: defaultdict[type, list[Any]] = defaultdict(list)

    def latest(self, kind: type[_Said]) -> _Said | None:
        """Return what holds of a kind; None while nobody has said anything."""
        said = self._said[kind]
        return said[-1] if said else None

    def begin(self, said: object) -> None:
        """Let ``said`` hold until its :meth:`end`."""
        self._said[type(said)].append(said)

    def end(self, said: object) -> None:
        """Let hold what held before ``said``, which was the last of its kind."""
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
"""The only one: see above why a process has no more."""

"""A backward that the user's step starts itself: where it starts, and how far it leads back.

Each stage has a part of the step's graph. A backward that would lead over a cut ends there, at what
the stage before has sent, and says nothing::

    stage 0   embedding, block 0 |
    stage 1                      | block 1, loss, torch.autograd.grad(loss, x)
                                 ^ ends here: x is where the graph does not reach
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.leaves import tensors_in
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line

_ELSEWHERE = -1


@dataclass(frozen=True)
class StartedBackward:
    """A backward that begins between the blocks.

    Attributes:
        segment: The segment that starts it.
        goals: The segments that made what it leads to; -1 for weights and the batch.
        line: The line of the user's code.
    """

    segment: int
    goals: frozenset[int]
    line: str


@dataclass
class OwnBackwards:
    """What a step differentiates by itself.

    Attributes:
        any: Whether it does so at all, inside a block or not.
        crossed: The blocks into whose output such a backward leads back.
        started: The backwards that begin between the blocks.
    """

    any: bool = False
    crossed: set[int] = field(default_factory=set)
    started: list[StartedBackward] = field(default_factory=list)

    def see(self, func: Callable[..., Any], args: Any, kwargs: Any, segment: int | None) -> None:
        """Note the call of a torch function, if it starts a backward from the model's values.

        Args:
            func: The function.
            args: Its arguments.
            kwargs: Its arguments by name.
            segment: The segment that calls it; None: a block does.
        """
        if func not in (torch.autograd.grad, Tensor.backward):
            return
        outputs, *rest = args or (kwargs["outputs"],)
        if not any(isinstance(leaf, ShapeOnly) for leaf in tensors_in(outputs)):
            return
        self.any = True
        if segment is not None:
            is_given = bool(rest) and func is torch.autograd.grad
            inputs = rest[0] if is_given else kwargs.get("inputs")
            goals = {_segment_of(leaf) for leaf in tensors_in(inputs)} or {_ELSEWHERE}
            self.started.append(StartedBackward(segment, frozenset(goals), calling_line()))

    def cross(self, block: int) -> None:
        """Note that one leads back into a block."""
        self.any = True
        self.crossed.add(block)


def _segment_of(leaf: Tensor) -> int:
    birth = getattr(leaf, "birth", None)
    return _ELSEWHERE if birth is None else birth.segment

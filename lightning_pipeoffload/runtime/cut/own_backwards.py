"""Backwards that a step starts itself, such as for a gradient penalty."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeoffload.runtime import tensors_in
from lightning_pipeoffload.runtime.cut.observers import Observer
from lightning_pipeoffload.runtime.cut.record_part import RecordPart
from lightning_pipeoffload.runtime.shapes import ShapeOnly
from lightning_pipeoffload.runtime.users_code import running_user_line

# torch 2.13 lets modes see the second one; by others a trace sees what it leads back to.
_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_ELSEWHERE = -1  # the goal of a backward that leads to weights or the batch


class StartedBackward(NamedTuple):
    """A backward that the step starts itself, between its blocks."""

    segment: int
    goals: frozenset[int]  # segments that made its inputs; -1: a weight, the batch, or no inputs
    line: str


@dataclass
class UserBackwards(RecordPart):
    """The backwards that a step starts, as a part of its record.

    If there are any, no weight gradient is deferred to W.

    Attributes:
        are_any: Whether the step starts a backward itself.
        between: Those between the blocks.
        in_blocks: By block, the line that starts one in the block.
        reached: Blocks that a backward reaches.
    """

    are_any: bool = False
    between: list[StartedBackward] = field(default_factory=list)
    in_blocks: dict[int, str] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)

    def record_reached(self, block: int) -> None:
        """Record that a backward reaches a block: the trace starts none."""
        self.are_any = True
        self.reached.add(block)


class BackwardObserver(Observer[UserBackwards]):
    """Finds calls of torch's backward functions."""

    def record_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func not in _BACKWARDS:
            return
        outputs, *rest = args or (kwargs["outputs"],)
        if not any(isinstance(leaf, ShapeOnly) for leaf in tensors_in(outputs)):
            return
        self._part.are_any = True
        segment, is_in_block = self._trace.point
        if is_in_block:
            self._part.in_blocks.setdefault(segment, running_user_line())
            return
        is_given = bool(rest) and func is torch.autograd.grad
        inputs = tensors_in(rest[0] if is_given else kwargs.get("inputs"))
        sources = [getattr(leaf, "source", None) for leaf in inputs]
        goals = {_ELSEWHERE if source is None else source.position for source in sources}
        segment = self._trace.segment_of_operation(tensors_in(outputs))
        started = StartedBackward(segment, frozenset(goals or {_ELSEWHERE}), running_user_line())
        self._part.between.append(started)

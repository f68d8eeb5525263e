"""What a trace tells its observers; each answers one question about the step, in a file of its own.

An observer fills its part of the step's record. A new question is a file with a part and an
observer, a field of :class:`.record.StepRecord`, and a line in ``_observers`` of :mod:`.trace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.call_order import CallOrder
from lightning_pipeoffload.runtime.users_code.attributes import StepPoint


class Running(Protocol):
    """The running trace, for observers."""

    @property
    def module(self) -> nn.Module:
        """The user's module."""

    @property
    def chain(self) -> BlockChain:
        """Its blocks."""

    @property
    def calls(self) -> CallOrder:
        """The order of their calls."""

    @property
    def num_calls(self) -> int:
        """The number of calls of blocks that have returned."""

    @property
    def point(self) -> StepPoint:
        """The point of the step that is running."""


class Operation(NamedTuple):
    """An operation on shape-only tensors."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    result: Any
    segment: int
    operands: Sequence[Any]  # shape-only tensors among the arguments that the step has made


class Observer:
    """Notes events of a traced step; it overrides the events that its question needs."""

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context for the step."""
        return nullcontext()

    def enter_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a block is called."""

    def leave_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that the block returns; the arguments are those of :meth:`enter_block`."""

    def note(self, operation: Operation) -> None:
        """Note an operation on shape-only tensors."""

    def finish(self) -> None:
        """Complete the part of the record after the step, before the module is restored."""

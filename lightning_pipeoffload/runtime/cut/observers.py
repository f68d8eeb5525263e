"""What a trace tells its observers; each answers one question about the step, in a file of its own.

An observer fills its part of the step's record. A new question is a file with a part and an
observer, a field of :class:`.record.StepRecord`, and a line of the list in :mod:`.trace`. An
operation on shape-only tensors is told twice: by ``record_operation`` where the step calls it,
without keyword arguments, then by ``record_below_autograd`` below autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from lightning_pipeoffload.runtime.cut.block_chain import BlockChain
from lightning_pipeoffload.runtime.cut.call_order import CallOrder
from lightning_pipeoffload.runtime.cut.record_part import RecordPart
from lightning_pipeoffload.runtime.cut.stripped_module import StrippedModule
from lightning_pipeoffload.runtime.users_code import StepPoint


class RunningTrace(Protocol):
    """The running trace.

    Attributes:
        module: The user's module.
        stripped: What stands for its tensors.
        chain: Its blocks.
        calls: The order of their calls.
        device: The device that tensors report.
        is_in_call: Whether a block is called, and its arguments and output are passed.
    """

    module: nn.Module
    stripped: StrippedModule
    chain: BlockChain
    calls: CallOrder
    device: torch.device
    is_in_call: bool

    @property
    def num_calls(self) -> int:
        """The number of calls of blocks that have returned."""

    @property
    def point(self) -> StepPoint:
        """The point of the step that is running."""

    def segment_of_operation(self, tensors: Iterable[Any]) -> int:
        """Return the segment of an operation on tensors, at this point."""


class Operation(NamedTuple):
    """An operation of the step, with the segment in which a stage runs it."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    segment: int


_Part = TypeVar("_Part", bound=RecordPart)


class Observer(Generic[_Part]):
    """Overrides the events that its question needs, and fills its part of the trace's record."""

    def __init__(self, trace: RunningTrace, part: _Part) -> None:
        self._trace, self._part = trace, part

    def start(self, batch: Sequence[Tensor]) -> None:
        """Record the tensors of the microbatch, which the step gets."""

    def recording(self) -> AbstractContextManager[Any]:
        """Return a context for the step."""
        return nullcontext()

    def before_block(self, index: int, arguments: Any) -> None:
        """Record that a block is called."""

    def enter_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record that a block begins, with aliases of its arguments."""

    def leave_block(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record that it ends; the arguments are those with which it began."""

    def record_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call of a function of torch."""

    def record_operation(self, operation: Operation) -> None:
        """Record an operation on shape-only tensors, above autograd; ``kwargs`` are empty."""

    def record_below_autograd(self, operation: Operation) -> None:
        """Record an operation below autograd, on tensors with values or without."""

    def record_kernel(self, name: str, arguments: Any) -> None:
        """Record a call of a kernel that takes addresses, which runs on zeros."""

    def record_loss(self, loss: Tensor) -> None:
        """Record the loss of a training step."""

    def finish(self) -> None:
        """Complete the part of the record after the step, before the module is restored."""


def overriding_methods(event: Callable[..., None], observers: Iterable[Observer[Any]]) -> list[Any]:
    """Return the methods of those observers that override an event of :class:`Observer`."""
    name = event.__name__
    return [getattr(each, name) for each in observers if getattr(type(each), name) is not event]

"""What blocks get in a step, call by call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map  # private: see runtime/leaves

from lightning_pipeoffload.runtime import leaves_of
from lightning_pipeoffload.runtime.compiled import is_compiled
from lightning_pipeoffload.runtime.cut.observers import Observer, RunningTrace
from lightning_pipeoffload.runtime.cut.record_part import OF_TRACE, RecordPart
from lightning_pipeoffload.runtime.shapes import ShapeOnly


@dataclass
class BlockArguments(RecordPart):
    """The arguments of the blocks, as a part of a step's record.

    Attributes:
        shapes: For each call, the shapes of the arguments' leaves; None for a non-tensor.
        calls: Each call, if any block is compiled, which is done ahead.
    """

    shapes: list[list[torch.Size | None]] = field(default_factory=list, metadata=OF_TRACE)
    calls: list[BlockCall] = field(default_factory=list, metadata=OF_TRACE)


class BlockArgumentObserver(Observer[BlockArguments]):
    """Describes the arguments of each call of a block."""

    def __init__(self, trace: RunningTrace, arguments: BlockArguments) -> None:
        super().__init__(trace, arguments)
        self._is_compiled = any(is_compiled(block) for block in trace.chain.blocks)

    def before_block(self, index: int, arguments: Any) -> None:
        self._part.shapes.append([*map(_shape_of, leaves_of(arguments))])
        if self._is_compiled:
            self._part.calls.append(BlockCall.of(arguments, self._trace.device.type))


def _shape_of(leaf: Any) -> torch.Size | None:
    return leaf.shape if isinstance(leaf, Tensor) else None


@dataclass(frozen=True)
class BlockCall:
    """One call of a block in training, without the values of its arguments."""

    arguments: Any
    autocast: torch.dtype | None  # None: autocast is off
    device_type: str

    @classmethod
    def of(cls, arguments: Any, device_type: str) -> BlockCall:
        """Record the current call with its modes, such as autocast."""
        is_on = torch.is_autocast_enabled(device_type)
        autocast = torch.get_autocast_dtype(device_type) if is_on else None
        return cls(tree_map(_describe, arguments), autocast, device_type)

    @contextmanager
    def zero_arguments(self) -> Iterator[Any]:
        """Yield the arguments with zeros for values, under the autocast of the call."""
        with torch.autocast(self.device_type, self.autocast, enabled=self.autocast is not None):
            yield tree_map(_make_zeros, self.arguments)


@dataclass(frozen=True)  # no tuple, which would be a pytree
class _Argument:
    meta: Tensor
    device: torch.device
    requires_grad: bool


def _describe(leaf: Any) -> Any:
    if not isinstance(leaf, ShapeOnly):
        return leaf
    return _Argument(leaf.meta.detach(), leaf.device, leaf.requires_grad)


def _make_zeros(leaf: Any) -> Any:
    if not isinstance(leaf, _Argument):
        return leaf
    zeros = torch.zeros_like(leaf.meta, device=leaf.device)
    return zeros.requires_grad_(leaf.requires_grad)

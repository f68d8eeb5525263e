"""Which parts of a step draw random numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_pipeoffload.runtime.cut.observers import Observer, Operation, RunningTrace
from lightning_pipeoffload.runtime.cut.record_part import OF_TRACE, RecordPart
from lightning_pipeoffload.runtime.shapes import has_shape_only, record_draw

aten = torch.ops.aten


@dataclass
class Draws(RecordPart):
    """What draws random numbers, as a part of a step's record.

    Attributes:
        segments: Segments that draw from a generator argument, or draw real numbers in the trace.
        by_chance: Those of them that read values, which may decide what code runs.
        modules: With tensor parallelism: for each module that draws random numbers, whether for a
            shard.
        outside_torch: Whether the step draws from numpy's or Python's global generator.
    """

    segments: set[int] = field(default_factory=set)
    by_chance: set[int] = field(default_factory=set)
    modules: dict[nn.Module, bool] = field(default_factory=dict, metadata=OF_TRACE)
    outside_torch: bool = False


class DrawObserver(Observer[Draws]):
    """Finds operations that draw, by segment and by module."""

    def __init__(self, trace: RunningTrace, draws: Draws) -> None:
        super().__init__(trace, draws)
        self._reading: set[int] = set()

    def record_below_autograd(self, operation: Operation) -> None:
        func, args, kwargs, _, segment = operation
        if func is aten._local_scalar_dense.default:
            self._reading.add(segment)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        if kwargs.get("generator") is not None or not has_shape_only(args):
            self._part.segments.add(segment)
        if self._trace.stripped.has_shards:
            record_draw(self._part.modules, self._trace.module, func, args, kwargs)

    def finish(self) -> None:
        self._part.by_chance |= self._part.segments & self._reading

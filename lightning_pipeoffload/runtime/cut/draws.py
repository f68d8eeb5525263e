"""Which parts of a step draw random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_pipeoffload.runtime.shapes.drawing_modules import note_draw
from lightning_pipeoffload.runtime.shapes.shape_only import has_shapes

aten = torch.ops.aten


@dataclass
class Draws:
    """A part of a step's record.

    Attributes:
        segments: Segments that draw from a generator argument, or draw real numbers in the trace.
        by_chance: Those of them that read values, which may decide what code runs.
        modules: With tensor parallelism: for each module that draws random numbers, whether for a
            shard.
        beside_torch: Whether the step draws from numpy's or Python's global generator.
    """

    segments: set[int] = field(default_factory=set)
    by_chance: set[int] = field(default_factory=set)
    modules: dict[nn.Module, bool] = field(default_factory=dict)
    beside_torch: bool = False

    @property
    def structure(self) -> tuple[Any, ...]:
        """All that does not depend on lengths; modules are of the blocks that run in a trace."""
        return self.segments, self.by_chance, self.beside_torch


class DrawWatch:
    """Finds them in a trace.

    Args:
        draws: The part of the trace's record.
        module: The user's module.
        has_shards: Returns whether tensor ranks share its layers.
    """

    def __init__(self, draws: Draws, module: nn.Module, has_shards: Callable[[], bool]) -> None:
        self._draws, self._module, self._has_shards = draws, module, has_shards
        self._reading: set[int] = set()

    def note(self, segment: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note an operation of a segment."""
        if func is aten._local_scalar_dense.default:
            self._reading.add(segment)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        if kwargs.get("generator") is not None or not has_shapes(args):
            self._draws.segments.add(segment)
        if self._has_shards():
            note_draw(self._draws.modules, self._module, func, args, kwargs)

    def finish(self) -> None:
        """Complete the record after the step."""
        self._draws.by_chance |= self._draws.segments & self._reading

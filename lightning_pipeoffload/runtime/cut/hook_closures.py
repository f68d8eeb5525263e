"""Sees what hooks that a step registers have bound, and where that is changed afterwards.

A hook runs in the backward, and finds in the step's variables what they are in the end. A stage
leaves the step before that, so what changes behind the cut would be as it was there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CellType
from typing import Any, NamedTuple

from torch import Tensor

from lightning_pipeoffload.runtime.users_code.attribute_uses import look_at
from lightning_pipeoffload.runtime.users_code.look import Look, is_same_look
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line


class LateChange(NamedTuple):
    """A change of what a hook has bound.

    Attributes:
        variable: The name of the step's variable.
        line: The line that registers the hook.
        first: The segment of that line.
        last: The segment that changes the variable.
    """

    variable: str
    line: str
    first: int
    last: int


@dataclass
class _Bound:
    variable: str
    cell: CellType
    line: str
    segment: int
    look: Look


class HookClosures:
    """Watches the hooks on tensors of one run of a step.

    Attributes:
        found: The changes behind the segment in which the hook was registered.
    """

    def __init__(self) -> None:
        self._bound: list[_Bound] = []
        self.found: list[LateChange] = []

    def see(self, func: Callable[..., Any], args: Any, segment: int | None) -> None:
        """Note the call of a torch function between the blocks, if it registers a hook.

        Args:
            func: The function.
            args: Its arguments.
            segment: The segment that calls it; None: a block does.
        """
        if func is not Tensor.register_hook or segment is None or len(args) < 2:
            return
        cells = getattr(args[1], "__closure__", None) or ()
        names = args[1].__code__.co_freevars if cells else ()
        for name, cell in zip(names, cells, strict=True):
            self._bound.append(_Bound(name, cell, calling_line(), segment, _look(cell)))

    def look(self, segment: int) -> None:
        """Note what has changed up to the end of a part of the step."""
        for bound in self._bound:
            now = _look(bound.cell)
            if segment > bound.segment and not is_same_look(bound.look, now):
                self.found.append(LateChange(bound.variable, bound.line, bound.segment, segment))
            bound.look = now


def _look(cell: CellType) -> Look:
    try:
        return look_at(cell.cell_contents)
    except ValueError:  # it has no value yet
        return []

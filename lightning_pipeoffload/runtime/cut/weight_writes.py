"""The parameters of a module that is probed, and what the step writes into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_pipeoffload.runtime.shapes.operations import written_arguments
from lightning_pipeoffload.runtime.shapes.shape_only import (
    ShapeOnly,
    memory_of,
    shape_only_leaves,
)
from lightning_pipeoffload.runtime.users_code.tensor_slots import find_slots
from lightning_pipeoffload.runtime.users_code.users_lines import calling_line


class WeightWrite(NamedTuple):
    """A write into a parameter.

    Attributes:
        name: The name of the parameter.
        segment: The segment of the step that writes.
        line: The line of the user's code.
    """

    name: str
    segment: int
    line: str


class WeightWatch:
    """Knows parameters by what stands for them, and sees writes.

    Args:
        find_segment: Returns the segment of the step that runs.

    Attributes:
        writes: The writes that were seen.
    """

    def __init__(self, find_segment: Callable[[], int]) -> None:
        self._find_segment = find_segment
        self._names: dict[int, str] = {}
        self._memories: dict[int, str] = {}
        self.writes: list[WeightWrite] = []

    def add(self, stand_in: ShapeOnly, name: str) -> None:
        """Know ``stand_in`` as the parameter of this name."""
        stand_in.is_weight = True  # type: ignore[attr-defined]
        self._names[id(stand_in)] = name
        self._memories[memory_of(stand_in)] = name

    def name_of(self, tensor: Any) -> str | None:
        """Return the name of a parameter; None of what is none."""
        return self._names.get(id(tensor))

    def see(self, func: torch._ops.OpOverload, args: tuple[Any, ...]) -> None:
        """Note what an operation writes."""
        for written in shape_only_leaves(list(written_arguments(func, args))):
            if memory_of(written) in self._memories:
                self._note(self._memories[memory_of(written)])

    def _note(self, name: str) -> None:
        self.writes.append(WeightWrite(name, self._find_segment(), calling_line()))

    @contextmanager
    def seeing_new(self, module: nn.Module) -> Iterator[None]:
        """Note where the step puts another parameter into the place of one."""
        names = {(id(slot.module), slot.attribute): slot.name for slot in find_slots(module)}
        plain = nn.Module.register_parameter

        def register(owner: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if (id(owner), name) in names:
                self._note(names[id(owner), name])
                self._names[id(parameter)] = names[id(owner), name]
            plain(owner, name, parameter)

        nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = plain  # type: ignore[method-assign]

"""What parameters get their values from while a module is made: which others, which function."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.making.parameter_shape import ParameterShape
from lightning_pipeoffload.runtime.making.unfilled_memory import UnfilledMemory
from lightning_pipeoffload.runtime.shapes.operations import written_arguments
from lightning_pipeoffload.runtime.shapes.remote_draws import draws_by_shape
from lightning_pipeoffload.runtime.shapes.shape_only import (
    ShapeOnly,
    memory_of,
    shape_only_leaves,
)
from lightning_pipeoffload.runtime.shapes.value_needed import ValueNeededError
from lightning_pipeoffload.runtime.users_code.users_lines import running_frames

AS_MADE = "as made"
UNFILLED = "nothing"
_TORCH = Path(torch.__file__).parent
_RUNTIME = Path(__file__).parents[1]  # load_weights, which is not in it, is a writer
_WRITERS_OF_TORCH = {"_reset_parameters", "_load_from_state_dict"}
_SAME = {"_load_from_state_dict": "load_state_dict"}


class Derivations:
    """Follows the writes into parameters, which have no values yet.

    Attributes:
        sources: Of each parameter that was written, by its place in the order of appearance: the
            origins of what was written.
        writers: The function that wrote each last.
    """

    def __init__(self) -> None:
        self.sources: dict[int, set[str]] = defaultdict(set)
        self.writers: dict[int, str] = {}
        self._memories: dict[int, int] = {}
        self._kept: list[Tensor] = []  # an address is another's once its owner is gone
        self._unfilled = UnfilledMemory()

    def add(self, index: int, shape: ParameterShape, parameter: Tensor) -> None:
        """Follow the writes into a parameter.

        Args:
            index: Its place in the order of appearance.
            shape: What stands for it.
            parameter: What it was made as.
        """
        self._follow(index, shape)
        if isinstance(parameter, ShapeOnly):
            self.derive(index, parameter.origins)
        if self._unfilled.holds(parameter):
            self._unfilled.add(shape)

    def add_empty(self, index: int, shape: ParameterShape) -> None:
        """Follow the writes into what a parameter may be given up for, which has no value yet."""
        if memory_of(shape) not in self._memories:
            self._unfilled.add(shape)
        self._follow(index, shape)

    def _follow(self, index: int, shape: ParameterShape) -> None:
        self._memories[memory_of(shape)] = index
        self._kept.append(shape.meta)

    def writer_of(self, index: int, parameter: Tensor) -> str:
        """Say what has given a parameter its value; it is what stands in the module now."""
        if self._unfilled.holds(parameter):
            return UNFILLED
        return self.writers.get(index, AS_MADE)

    def derive(self, index: int, origins: Iterable[str]) -> None:
        """Note that a parameter was made from others."""
        self.sources[index].update(origins)

    def see(self, func: torch._ops.OpOverload, args: tuple[Any, ...], result: Any) -> None:
        """Note what an operation writes.

        Raises:
            ValueNeededError: Nobody knows how many numbers it draws.
        """
        if not draws_by_shape(func):
            found = shape_only_leaves(args)
            origins = frozenset[str]().union(*(leaf.origins for leaf in found))
            raise ValueNeededError(f"{func.overloadpacket.__name__}()", origins)
        self._unfilled.see(func, args, result)
        for written in shape_only_leaves(list(written_arguments(func, args))):
            index = self._memories.get(memory_of(written))
            if index is not None:
                self._note(index, args)

    def see_data(self, shape: ParameterShape, index: int, value: Tensor) -> None:
        """Note that a parameter was given another tensor's value."""
        self.add(index, shape, value)
        self._note(index, value)

    def _note(self, index: int, written: Any) -> None:
        writer = _writer()
        if writer is not None:
            self.writers[index] = writer
        for leaf in shape_only_leaves(written):
            self.derive(index, leaf.origins)


def _writer() -> str | None:
    """Name the function that is writing a parameter; None: it is only converted."""
    for frame in running_frames():
        name = frame.f_code.co_name
        if not _is_passed_over(frame):
            return _SAME.get(name, name)
        if name == "_apply":  # private: how a module goes to a dtype or device
            return None
    return AS_MADE


def _is_passed_over(frame: FrameType) -> bool:
    path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
    if _TORCH in path.parents:
        is_inner = name.startswith("_") and name not in _WRITERS_OF_TORCH
        return is_inner or _TORCH / "nn" not in path.parents or path.name == "init.py"
    if name == "__torch_function__":  # of a mode, in which Lightning makes modules
        return True
    is_of_transformers = path.parts[-2:] == ("transformers", "initialization.py")
    return is_of_transformers or _RUNTIME in path.parents

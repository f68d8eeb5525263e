"""The sizes that a step takes from its batch's values beside its blocks, as packing does.

Shapes then differ between microbatches that look alike. Every rank has the batch, so each can tell
these sizes by running the beginning of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # private: its documented home

from lightning_pipeoffload.runtime.leaves import tensors_in
from lightning_pipeoffload.runtime.shapes.value_sizes import is_sized_by_values

aten = torch.ops.aten


class BatchSizes(TorchDispatchMode):
    """Notes the sizes that depend on values.

    Args:
        find_place: Returns the segment of the step that runs; None inside of blocks.

    Attributes:
        found: Shapes, and answers to questions.
        last: Segment in which there is one; None: in none.
    """

    def __init__(self, find_place: Callable[[], int | None]) -> None:
        super().__init__()
        self._find_place = find_place
        self.found: list[Any] = []
        self.last: int | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, and note its result's shapes where they depend on values."""
        result = func(*args, **(kwargs or {}))
        place = self._find_place()
        if place is not None:
            self._note(func, args, result, place)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], result: Any, place: int) -> None:
        if is_sized_by_values(func, args):
            self.found.append(tuple(tensor.shape for tensor in tensors_in(result)))
            self.last = place
        elif func is aten._local_scalar_dense.default and not _is_fraction(args[0]):
            # A number may be a length, where the shapes tell; most answers change no shape.
            is_answer = isinstance(result, bool)
            self.found.append(result if is_answer else None)
            self.last = self.last if is_answer else place


def _is_fraction(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()

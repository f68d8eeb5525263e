"""The peak memory of a part of a step, of real tensors or of shape-only ones."""

from __future__ import annotations

from typing import Any
from weakref import finalize

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # private: its documented home

from lightning_pipeoffload.runtime import tensors_in
from lightning_pipeoffload.runtime.shapes import ShapeOnly, storage_key, storage_of


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of each storage that an operation under this mode makes, until it is freed.

    Attributes:
        peak: The most bytes that were allocated at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._num_tensors: dict[int, int] = {}  # of each storage that was made inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {storage_key(tensor) for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            key = storage_key(tensor)
            if key in self._num_tensors or key not in inputs:
                self._add(key, tensor)
        self.peak = max(self.peak, self._now)
        return result

    def _add(self, key: int, tensor: Tensor) -> None:
        # A shape's meta tensor: what autograd has saved is another object with the same one.
        held = tensor.meta if isinstance(tensor, ShapeOnly) else tensor
        size = storage_of(tensor).nbytes()
        if key not in self._num_tensors:
            self._now += size
        self._num_tensors[key] = self._num_tensors.get(key, 0) + 1
        finalize(held, self._drop, key, size).atexit = False

    def _drop(self, key: int, size: int) -> None:
        self._num_tensors[key] -= 1
        if not self._num_tensors[key]:
            del self._num_tensors[key]
            self._now -= size

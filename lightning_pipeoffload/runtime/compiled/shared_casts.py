"""Casts of weights that the microbatches of a step share, where autocast would make each its own.

A compiled region under autocast casts its weights at each call. Those whose gradients wait for W
are cast outside of it, once a step, as autocast does for what is not compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_pipeoffload.runtime.in_force import IN_FORCE


class SharedCasts:
    """The casts of one step."""

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype], tuple[Tensor, int, Tensor]] = {}

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight in another dtype."""
        key = id(weight), dtype
        found = self._casts.get(key)
        if found is None or found[1] != weight._version:  # private: a step may write its weights
            found = self._casts[key] = weight, weight._version, weight.to(dtype)
        return found[2]


@contextmanager
def sharing_compiled_casts() -> Iterator[None]:
    """Let microbatches inside share the casts of weights."""
    with IN_FORCE.during(SharedCasts()):
        yield


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a weight in another dtype, the one that this step's microbatches share if any do."""
    casts = IN_FORCE.latest(SharedCasts)
    return weight.to(dtype) if casts is None else casts.of(weight, dtype)

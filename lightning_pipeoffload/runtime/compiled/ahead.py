"""Compiles blocks before the first step: their regions are compiled, and left before they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from lightning_pipeoffload.runtime.in_force import IN_FORCE
from lightning_pipeoffload.runtime.weight_grad.queue import WeightGradQueue, deferring

Region = Callable[..., Any]


class _Ahead:
    """Says that regions are compiled, and not to be run."""


class _RegionReached(BaseException):
    """Leaves a block whose first region has been compiled."""


def leave_if_ahead() -> None:
    """Leave the block where regions are compiled only."""
    if IN_FORCE.latest(_Ahead) is not None:
        raise _RegionReached


def leaving_if_ahead(region: Region) -> Region:
    """Return a region that is left where regions are compiled only."""
    if IN_FORCE.latest(_Ahead) is None:
        return region

    @wraps(region)
    def run(*inputs: Any) -> Any:
        leave_if_ahead()
        return region(*inputs)

    return run


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Compile the first region that is called inside, as a forward of training would, and leave."""
    try:
        with IN_FORCE.during(_Ahead()), deferring(WeightGradQueue()), torch.enable_grad():
            yield
    except _RegionReached:
        pass

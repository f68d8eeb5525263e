"""Autocast around a step whose forwards and backwards interleave.

The step has one context. Its microbatches share the casts of the weights, of which each would
otherwise keep its own until its backward; a backward runs outside of autocast, as it does behind a
step that runs in one go.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch

from lightning_pipeoffload.runtime.compiled.products import sharing_compiled_casts


@contextmanager
def sharing_casts(device: torch.device) -> Iterator[None]:
    """Let forwards inside of an autocast context cast each weight once.

    Lightning's contexts cast at every use.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(before or _knows_gradients(device.type))
    try:
        with sharing_compiled_casts():
            yield
    finally:
        torch.set_autocast_cache_enabled(before)


def forget_casts() -> None:
    """Cast weights anew that were written without autocast's knowledge."""
    torch.clear_autocast_cache()


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Run a backward as behind a step: each operation in the dtype that its forward had.

    The context around stays open, and with it the casts that are shared.
    """
    is_on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else nullcontext()


@cache
def _knows_gradients(device_type: str) -> bool:
    """Whether a cast made under no_grad is made again for a forward that needs its gradient.

    Where torch hands out the one without, a weight would silently get no gradient.
    """
    weight = torch.ones(1, 1, device=device_type, requires_grad=True)
    with torch.enable_grad(), torch.autocast(device_type, torch.bfloat16, cache_enabled=True):
        with torch.no_grad():
            torch.mm(weight.detach(), weight)
        return torch.mm(weight.detach(), weight).requires_grad

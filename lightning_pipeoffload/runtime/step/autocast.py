"""Autocast in a step whose forwards and backwards interleave.

One autocast context spans the step, so that all microbatches share one cast of each weight instead
of keeping one each until their backward. Backwards run with autocast off, as on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch

from lightning_pipeoffload.runtime.compiled.products import sharing_compiled_casts
from lightning_pipeoffload.runtime.contexts import NOTHING


@contextmanager
def sharing_casts(device: torch.device) -> Iterator[None]:
    """Cast each weight once per step; Lightning's own contexts cast it at every use."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(before or _knows_gradients(device.type))
    try:
        with sharing_compiled_casts(), without_fused_layers(device):
            yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def without_fused_layers(device: torch.device) -> Iterator[None]:
    """Run torch's transformer layers by their parts under autocast, as on shapes.

    Without gradients they have fused kernels, which ignore autocast: torch avoids them only under
    that of CUDA.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(before and not torch.is_autocast_enabled(device.type))
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def forget_casts() -> None:
    """Drop the casts, of weights that have been written since."""
    torch.clear_autocast_cache()


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switch autocast off for a backward; the shared casts stay."""
    is_on = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_on else NOTHING


@cache
def _knows_gradients(device_type: str) -> bool:
    """Return whether torch's autocast cache separates casts under no_grad from others.

    Otherwise a weight would silently get no gradient.
    """
    weight = torch.ones(1, 1, device=device_type, requires_grad=True)
    with torch.enable_grad(), torch.autocast(device_type, torch.bfloat16, cache_enabled=True):
        with torch.no_grad():
            torch.mm(weight.detach(), weight)
        return torch.mm(weight.detach(), weight).requires_grad

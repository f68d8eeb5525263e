"""Autocast in a step whose forwards and backwards interleave.

One autocast context spans the step, so that all microbatches share one cast of each weight instead
of keeping one each until their backward. Backwards run with autocast off, as on one device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache

import torch

from lightning_pipeoffload.runtime import NOTHING
from lightning_pipeoffload.runtime.compiled import sharing_compiled_casts


def sharing_casts(device: torch.device) -> AbstractContextManager[None]:
    """Under autocast, cast each weight once per step; Lightning's own contexts do at every use."""
    return _sharing_casts(device) if torch.is_autocast_enabled(device.type) else NOTHING


@contextmanager
def _sharing_casts(device: torch.device) -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(before or _separates_no_grad_casts(device.type))
    try:
        with sharing_compiled_casts(), without_mha_fastpath(device):
            yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def without_mha_fastpath(device: torch.device) -> Iterator[None]:
    """Under autocast, disable the fused inference kernels of torch's transformer layers.

    These kernels ignore autocast, and torch avoids them only for CUDA's autocast. The trace without
    values runs the layers unfused.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(before and not torch.is_autocast_enabled(device.type))
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def forget_casts() -> None:
    """Clear the cached casts of weights, after the weights have been written."""
    torch.clear_autocast_cache()


@cache
def _separates_no_grad_casts(device_type: str) -> bool:
    """Return whether torch's autocast cache separates casts under no_grad from others.

    Otherwise a weight would silently get no gradient.
    """
    weight = torch.ones(1, 1, device=device_type, requires_grad=True)
    with torch.enable_grad(), torch.autocast(device_type, torch.bfloat16, cache_enabled=True):
        with torch.no_grad():
            torch.mm(weight.detach(), weight)
        return torch.mm(weight.detach(), weight).requires_grad

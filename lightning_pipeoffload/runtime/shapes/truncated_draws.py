"""``nn.init.trunc_normal_`` of what another stage has.

torch draws again what falls outside of the bounds, and so looks at values: how often depends on the
numbers drawn before. So they are drawn here too, into a tensor that is dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import init

from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly

# Private: under whichever name trunc_normal_ was imported, it calls this one.
_draw = init._no_grad_trunc_normal_


def _draw_anywhere(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Do what torch's function does, for a tensor that has no value too."""
    if not isinstance(tensor, ShapeOnly):
        return _draw(tensor, *args, **kwargs)
    _draw(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), *args, **kwargs)
    with torch.no_grad():
        return tensor.zero_()  # a write, for those who follow them


def install_draws() -> None:
    """Let ``trunc_normal_`` take tensors without a value; again is harmless."""
    init._no_grad_trunc_normal_ = _draw_anywhere


def remove_draws() -> None:
    """Leave torch's function alone."""
    init._no_grad_trunc_normal_ = _draw

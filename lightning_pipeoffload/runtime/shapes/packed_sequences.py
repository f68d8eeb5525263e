"""Pads packed sequences that have no values; torch copies them into a real tensor."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import (  # private: whether there is one that counts calls
    _get_current_function_mode,
    handle_torch_function,
)

from lightning_pipeoffload.runtime import replaced
from lightning_pipeoffload.runtime.shapes.shape_only import ShapeOnly, substitute_values

# Private: what torch.nn.utils.rnn.pad_packed_sequence calls.
_pad = torch._VF._pad_packed_sequence


def pad_packed_on_shapes() -> AbstractContextManager[None]:
    """Make ``pad_packed_sequence`` accept sequences without values within the context."""
    return replaced(torch._VF, "_pad_packed_sequence", _pad_anywhere)


def _pad_anywhere(data: Tensor, *args: Any) -> Any:
    if _get_current_function_mode() is None:
        return _run(substitute_values(data), *args)
    return handle_torch_function(_run, (), substitute_values(data), *args)  # counts as one call


def _run(data: Tensor, *args: Any) -> Any:
    if not isinstance(data, ShapeOnly):
        return _pad(data, *args)
    rows, lengths = _pad(torch.arange(len(data)), *args)
    return data[rows], lengths

"""Memory of parameters that nothing fills, where initialization is left out say.

What ``torch.empty`` returns is whatever was there. So its first element is made not a number:
whoever fills the memory writes over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MAKERS = {
    *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
    *(Tensor.new_empty, Tensor.new_empty_strided),
}


class MarkingEmptyMemory(TorchFunctionMode):
    """Marks the beginning of what ``torch.empty`` and the like return inside."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func``."""
        made = func(*args, **(kwargs or {}))
        if func in _MAKERS and type(made) is Tensor and _may_be_marked(made):
            _first_of(made).fill_(torch.nan)
        return made


def begins_with_nan(tensor: Tensor) -> bool:
    """Whether a tensor that was marked, and given another type perhaps, has no value yet."""
    return _may_be_marked(tensor) and bool(_first_of(tensor).isnan().all())


def _may_be_marked(tensor: Tensor) -> bool:
    is_there = not tensor.is_meta and tensor.layout is torch.strided and tensor.numel() > 0
    return is_there and tensor.is_floating_point() and tensor.itemsize > 1


def _first_of(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((1,), (1,))

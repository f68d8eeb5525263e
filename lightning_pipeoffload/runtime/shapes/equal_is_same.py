"""Lets code that every rank runs tell parameters apart that are shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override


class EqualIsSame(TorchFunctionMode):
    """Answers ``torch.equal`` by identity.

    Lightning's BaseFinetuning asks by it whether an optimizer has a parameter already; by value no
    rank could tell, and two new norm layers would be taken for one.
    """

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.equal:
            return args[0] is args[1]
        return func(*args, **(kwargs or {}))

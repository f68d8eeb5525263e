"""Sees which modules with backward hooks are called around blocks.

Such a hook gets the gradients of what the module returns and of what it is given, at once. Where a
cut goes through the module no stage has both, and torch would leave the hook out without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as torchs


class HookedSpan(NamedTuple):
    """A call of a module with backward hooks.

    Attributes:
        name: The module.
        first: The segment that calls it.
        last: The segment in which it returns.
    """

    name: str
    first: int
    last: int


class HookedSpans:
    """Watches the calls of one run of a step.

    Args:
        module: The user's module.
        find_segment: Returns the segment that the step is in.

    Attributes:
        found: The calls that are given what has a gradient, and span several segments.
    """

    def __init__(self, module: nn.Module, find_segment: Callable[[], int]) -> None:
        is_any = bool(torchs._global_backward_hooks)  # private, as is _backward_hooks
        parts = module.named_modules()
        self._names = {part: name for name, part in parts if is_any or part._backward_hooks}
        self._find_segment = find_segment
        self._open: list[tuple[nn.Module, int]] = []
        self.found: list[HookedSpan] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what is called inside."""
        if not self._names:
            yield
            return
        before = torchs.register_module_forward_pre_hook(self._enter)
        after = torchs.register_module_forward_hook(self._leave)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, part: nn.Module, args: tuple[Any, ...]) -> None:
        trains = any(isinstance(value, Tensor) and value.requires_grad for value in args)
        if part in self._names and trains:
            self._open.append((part, self._find_segment()))

    def _leave(self, part: nn.Module, args: Any, output: Any) -> None:
        if self._open and self._open[-1][0] is part:
            _, first = self._open.pop()
            last = self._find_segment()
            if first < last:
                self.found.append(HookedSpan(self._names[part] or "the module", first, last))
